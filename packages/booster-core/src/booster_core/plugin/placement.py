"""Moving a whole model to its device and number formats, for strategies that keep it whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin.interface import as_tuple
from booster_core.precision import NARROW

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.precision import PrecisionPolicy


def check_no_masters(policy: PrecisionPolicy, plugin_name: str) -> PrecisionPolicy:
    """Return the policy if an optimizer that steps on the parameters themselves can follow it.

    Raises:
        ConfigError: If it asks for master weights in another format than the parameters.
    """
    if policy.param_dtype is not None and policy.master_dtype != policy.param_dtype:
        msg = (
            f"Plugin '{plugin_name}' keeps no master weights next to the parameters, so "
            f"`master_dtype={policy.master_dtype}` and `param_dtype={policy.param_dtype}` must be equal."
        )
        raise ConfigError(msg)
    return policy


def place_model(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    device: torch.device,
    policy: PrecisionPolicy,
    hollow: Container[int] = (),
) -> None:
    """Move a model and its optimizer's state to a device and to the policy's format.

    The optimizer keeps holding the parameters, also where a device needs new objects. Which of them change their
    format is said by `stored_dtypes`. Expanded tensors that are not trained get memory.

    Args:
        model: The user's model.
        optimizer: Its optimizer, or several; state made before is brought along.
        device: Where forward runs.
        policy: Precision of the run.
        hollow: The ``id`` of tensors without values, which are on the device; they stay as they are.
    """
    before = dict(model.named_parameters())
    model.to(device)
    after = dict(model.named_parameters())
    optimizers = as_tuple(optimizer)
    for each in optimizers:
        rebind(each, {before[name]: after[name] for name in before if before[name] is not after[name]})
    for tensor in [*model.parameters(), *model.buffers()]:
        if (
            not (tensor.requires_grad or id(tensor) in hollow)
            and tensor.layout == torch.strided
            and 0 in tensor.stride()
        ):
            tensor.data = tensor.data.contiguous()
    dtype_of = stored_dtypes(model, policy)
    for tensor in [*model.parameters(), *model.buffers()]:
        dtype = dtype_of(tensor)
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)
    for each in optimizers:
        if each.state:  # loading its own state casts and moves every entry to its parameter's device and format
            each.load_state_dict(each.state_dict())


def stored_dtypes(model: nn.Module, policy: PrecisionPolicy) -> Callable[[Tensor], torch.dtype]:
    """Return a function from a parameter or buffer of a model to the format in which a policy keeps it.

    Under autocast only trained parameters change theirs: a frozen base in bf16 stays small. In bf16 or fp16 buffers
    keep their own, such as tables of rotary embeddings, and so do the parameters of batch normalization.

    Args:
        model: The user's model.
        policy: Precision of the run.
    """
    dtype = policy.param_dtype
    own = normalisation_parameters(model) if dtype in NARROW else set()

    def dtype_of(tensor: Tensor) -> torch.dtype:
        is_left = dtype is None or not holds_numbers(tensor) or id(tensor) in own
        if is_left or (policy.follows_model and tensor.dtype == torch.float64):
            return tensor.dtype
        is_buffer = not isinstance(tensor, nn.Parameter)
        if (policy.uses_autocast and not tensor.requires_grad) or (is_buffer and dtype in NARROW):
            return tensor.dtype
        assert dtype is not None, "such tensors are left as they are"
        return dtype

    return dtype_of


def holds_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor can be converted between floating formats: not bits that bitsandbytes has packed.

    ``bnb_4bit_quant_storage`` keeps these in a floating format, which strategies may shard.
    """
    return tensor.is_floating_point() and getattr(tensor, "quant_state", None) is None


def gradient_norm_dtype(model: nn.Module, policy: PrecisionPolicy) -> torch.dtype:
    """Return the format of the norm of a model's gradients: fp64 where trained parameters are kept in that, else fp32.

    Args:
        model: The user's model, whole.
        policy: Precision of the run.
    """
    dtype_of = stored_dtypes(model, policy)
    trained = {dtype_of(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return torch.float64 if torch.float64 in trained else torch.float32


def normalisation_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters of batch normalization, whose kernel on the CPU needs the format of statistics."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common base of all of them
        for parameter in module.parameters(recurse=False)
    }


def rebind(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in an optimizer's groups and state by those that took their place.

    ``Module.to`` makes new parameters where a tensor can't change its device in place, as for meta.
    """
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
