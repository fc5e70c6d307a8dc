"""The device and the precision of a run, from what `Booster` and its plugin were asked for; moving a model there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.discovery import names_of_plugins
from booster_core.errors import ConfigError
from booster_core.plugin.interface import Boosted, Plugin, as_tuple
from booster_core.precision import NARROW, PrecisionPolicy
from booster_core.precision.policy import dtype_name
from booster_core.ranks.environments import accelerator, detect

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


def resolve_precision(asked: PrecisionPolicy | str | None, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision of a run; one that follows the model, where none was asked for.

    Args:
        asked: What Booster was asked for.
        plugin: Its plugin, which may have been asked as well.

    Raises:
        ConfigError: If the two answers differ, or the plugin does not support the precision.
    """
    if isinstance(asked, str) and asked in names_of_plugins():
        msg = f"`mixed_precision={asked!r}` is the name of a plugin. Did you mean `Booster(plugin={asked!r})`?"
        raise ConfigError(msg)
    own = None if plugin.precision is None else PrecisionPolicy.parse(plugin.precision)
    given = None if asked is None else PrecisionPolicy.parse(asked)
    if own is not None and given is not None and own != given:
        msg = (
            f"Precision was asked for twice with two answers: `mixed_precision={asked!r}` of Booster and "
            f"`precision={plugin.precision!r}` of plugin '{plugin.name}'. Give it in one place."
        )
        raise ConfigError(msg)
    return supported_precision(own or given or PrecisionPolicy(param_dtype=None, follows_model=True), plugin)


def precision_for(policy: PrecisionPolicy, objects: Boosted, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision in which objects are boosted: that of the run, unless it follows the model that is trained.

    Args:
        policy: What `resolve_precision` returned for the run.
        objects: What the user passed to ``boost``; a model without an optimizer is left as it is.
        plugin: The plugin of the run.

    Raises:
        ConfigError: If the plugin does not support the format of the model's trained parameters.
    """
    wanted = policy if objects.optimizer is None else policy.for_model(objects.model)
    if wanted is policy:
        return policy
    try:
        return supported_precision(wanted, plugin)
    except ConfigError as cause:
        msg = (
            f"No precision was asked for, and the model's trained parameters are in {wanted.name}, so that it is "
            f"trained as under `mixed_precision='{wanted.name}'`: {cause} To train it in fp32, pass "
            "`mixed_precision='fp32'`."
        )
        raise ConfigError(msg) from cause


def supported_precision(policy: PrecisionPolicy, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision that a run has under a plugin when a policy is asked for.

    Raises:
        ConfigError: If the plugin does not support it.
    """
    supported = sorted({"fp32", "bf16", "fp16"} & {capability.value for capability in plugin.capabilities})
    if policy.name not in supported:
        msg = f"Plugin '{plugin.name}' does not support precision '{policy.name}'. It supports: {', '.join(supported)}."
        raise ConfigError(msg)
    return plugin.resolve_precision(policy)


def describe_precision(
    policy: PrecisionPolicy,
    model: nn.Module | None = None,
    *,
    masters: torch.dtype | None = None,
    says_reduce: bool = True,
) -> list[str]:
    """Return lines on the formats of a run, for `Booster.describe`.

    Args:
        policy: What was asked for, or the precision of a boosted model.
        model: The boosted model, whose tensors say what they are; ``None`` where nothing is boosted yet.
        masters: Format of the copies that its optimizer updates, if there are any.
        says_reduce: Whether to name the format of sums over ranks.
    """
    formats = policy.describe()
    if not says_reduce:
        del formats["reduce"]
    if model is not None:
        trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
        params = _names_of(trained or frozen)
        formats["param"] = params + (f" (frozen ones {_names_of(frozen)})" if trained and frozen - trained else "")
        formats["master"] = "none" if masters is None else dtype_name(masters)
        if policy.param_dtype is None and policy.compute_dtype == torch.float32:
            formats["compute"] = params
    lines = ["precision  " + ", ".join(f"{name} {kept}" for name, kept in formats.items())]
    if policy.follows_model and model is None:
        lines.append("           a model in bf16 or fp16 is trained as under that name")
    return lines if policy.loss_scale is None else [*lines, f"           {policy.loss_scale}"]


def _names_of(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes))) or "none"


def check_device(asked: object, plugin: Plugin) -> torch.device | None:
    """Return the device that was asked for; ``None`` where none was.

    Raises:
        TypeError: If it is no device.
        ConfigError: If torch does not know it or does not have it, or the plugin does not run there.
    """
    if asked is None:
        return None
    is_class = isinstance(asked, type) and issubclass(asked, Plugin)
    if is_class or isinstance(asked, Plugin):
        kind = asked.__name__ if isinstance(asked, type) else type(asked).__name__
        what = f"the class `{kind}`, a plugin" if is_class else f"a `{kind}`, a plugin"
        msg = f"`device` is {what}. Did you mean `Booster(plugin={kind}(...))`? The device is the first argument."
        raise TypeError(msg)
    if not isinstance(asked, (str, int, torch.device)):
        msg = f"`device` is a device or its name, such as 'cpu'; got `{type(asked).__name__}`."
        raise TypeError(msg)
    try:
        device = torch.device(asked)
    except RuntimeError as cause:
        is_precision = asked in ("fp32", "bf16", "fp16", "pure-bf16")
        keyword = "plugin" if asked in names_of_plugins() else "mixed_precision" if is_precision else None
        if keyword is not None:
            kind = keyword.removeprefix("mixed_")
            own = f"`Booster({keyword}={asked!r})`"
            msg = f"`device={asked!r}` is the name of a {kind}, not a device. Did you mean {own}?"
        else:
            msg = f"`device={asked!r}` is not a device that torch knows. Use for example 'cpu' or 'cuda'."
        raise ConfigError(msg) from cause
    _check_present(asked, device)
    if not plugin.supports_device(device.type):
        msg = f"Plugin '{plugin.name}' does not run on device type '{device.type}'."
        raise ConfigError(msg)
    return device


def _check_present(asked: object, device: torch.device) -> None:
    """Raise where this machine lacks a device that torch knows by name."""
    if device.type in ("cpu", "meta"):
        return
    backend: Any = getattr(torch, device.type, None)
    is_there = backend.is_available() if hasattr(backend, "is_available") else _can_allocate(device)
    if not is_there:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        other = "the CPU" if here is None else f"the CPU and devices of type '{here.type}'"
        msg = (
            f"`device={asked!r}` needs a device of type '{device.type}', and torch {torch.__version__} sees none here. "
            f"It sees {other}. Use `device='{'cpu' if here is None else here.type}'`."
        )
        raise ConfigError(msg)
    if device.index is not None and hasattr(backend, "device_count") and device.index >= backend.device_count():
        msg = (
            f"`device={asked!r}` is not here: torch sees {backend.device_count()} device(s) of type '{device.type}', "
            f"'{device.type}:0' to '{device.type}:{backend.device_count() - 1}'."
        )
        raise ConfigError(msg)


def _can_allocate(device: torch.device) -> bool:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError):  # a build without the backend, or a backend without its library
        return False
    return True


def own_device(asked: torch.device | None, plugin: Plugin) -> torch.device:
    """Return the device of this process; of several devices that of its local rank, current since the launch.

    Raises:
        ConfigError: If that is not known yet, or the plugin does not run on the CPU and there is no other device.
    """
    if asked is None:
        kind = accelerator()
        asked = check_device(torch.device(kind if kind and plugin.supports_device(kind) else "cpu"), plugin)
        assert asked is not None, "a device was given"
    if asked.type != accelerator() or asked.index is not None:
        return asked
    num_started = 1 if torch.distributed.is_initialized() else detect().world_size
    if num_started > 1:
        msg = (
            f"A launcher started {num_started} processes, and which device is this one's is not known yet. Call "
            "`booster_core.launch()` before the device is used."
        )
        raise ConfigError(msg)
    return torch.device(asked.type, torch.accelerator.current_device_index())


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
