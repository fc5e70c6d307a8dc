"""What is refused: models that ranks would train apart, and gradients that nobody would reduce or step with.

Frozen parameters are watched too: a hook costs nothing until its parameter has been unfrozen and gets a gradient.

Hooks that a script puts on parameters see, in backward, the gradient of this rank's samples, not the average. What is
linear in the gradient, such as a mask, a factor or a constant that is added, may run before the average as well as
after it. So each hook that changes a gradient is tried on other gradients too, whenever it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import ConfigError, GradientError
from booster_core.state import NamedTensors
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping, Sequence

    from torch import Tensor

_NO_OPTIMIZER = (
    "but the model was boosted without an optimizer, so that nothing averages gradients over the ranks and each would "
    "train a model of its own. Pass the optimizer to `boost` together with the model. To evaluate or generate, use "
    "`torch.no_grad()`, or freeze the model with `model.requires_grad_(False)`."
)
_FROZEN = (
    "but it was frozen at `boost` and the optimizer does not hold it, so that nothing averages its gradients over the "
    "ranks. Unfreeze it before `boost` and make the optimizer with it, add it to the optimizer that `boost` returned "
    "with `optimizer.add_param_group`, or keep it frozen."
)


def refuse_composed(model: nn.Module) -> None:
    """Check that each parameter is one tensor, whose memory can be sent and laid out.

    Raises:
        ConfigError: Naming one that is made of others, as torchao's quantised weights are.
    """
    for name, parameter in model.named_parameters():
        if hasattr(type(parameter), "__tensor_flatten__"):  # torch's protocol of such classes
            msg = (
                f"Parameter '{name}' is a `{type(parameter).__name__}`, made of several tensors, which can't be "
                "sent to other ranks as it is. Train it without a plugin, on one device, or keep the base of adapters "
                "in few bits by `booster.enable_lora(..., quantize=True)`."
            )
            raise ConfigError(msg)


def check_distinct_memory(model: nn.Module) -> None:
    """Check that no trained parameter begins at the same place in memory as another one, lazy ones included.

    Sharding would untie them without a word.

    Frozen ones that share theirs are equal forever, tied or not.

    Args:
        model: The user's model, before anything of it is moved.

    Raises:
        ConfigError: Naming two that do, or one that `refuse_composed` refuses.
    """
    refuse_composed(model)
    found: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        other_name, other = found.setdefault(_place_of(parameter), (name, parameter))
        if other is not parameter and (other.requires_grad or parameter.requires_grad):
            msg = (
                f"Parameters '{other_name}' and '{name}' are two objects over the same memory. Tie them by assigning "
                "one Parameter to both modules; if they are adapters of tied embeddings (`ensure_weight_tying`), train "
                "the embedding by `modules_to_save` of the LoraConfig instead."
            )
            raise ConfigError(msg)


def _place_of(parameter: nn.Parameter) -> object:
    # Of a lazy tensor, the meta tensor of its geometry. Not by its class: `booster_runtime.lazy` uses this package.
    tensor = getattr(parameter, "lazy_inner", parameter)
    storage = tensor.untyped_storage()
    # A tensor of meta has no address, but its storage is an object of its own.
    begin = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()  # noqa: SLF001 - what identifies it
    return tensor.device, begin + tensor.storage_offset() * tensor.element_size()


def refuse_renormalized(model: nn.Module) -> None:
    """Check that no embedding renormalizes the rows that it looks up.

    ``max_norm`` writes to these rows in each forward. Ranks look up rows of their own samples, so replicas would
    differ, and a gathered table would lose the change.

    Raises:
        ConfigError: Naming an embedding with ``max_norm``.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            msg = (
                f"Embedding '{name}' has `max_norm={module.max_norm:g}`: each forward changes the rows that this rank "
                "looks up, so that ranks would train different models. Leave `max_norm` out, and normalize the rows "
                "that were looked up, or the whole table after `optimizer.step()`."
            )
            raise ConfigError(msg)


def refuse_all_gradients(model: nn.Module) -> None:
    """Raise at the first gradient of any of a model's parameters, because there is no optimizer to step with it.

    Raises:
        GradientError: In backward, naming the parameter.
    """
    names = NamedTensors.of(model).name_of
    for parameter in model.parameters():
        refuse_gradient(parameter, names[id(parameter)], _NO_OPTIMIZER)


def without_optimizer(name: str) -> GradientError:
    """Return the error for a parameter's gradient in a model that was boosted without its optimizer."""
    return GradientError(f"Parameter '{name}' got a gradient, {_NO_OPTIMIZER}")


def refuse_gradient(parameter: nn.Parameter, name: str, reason: str = _FROZEN) -> Any:
    """Raise at the first gradient of a parameter, until the handle that this returns is removed.

    Args:
        parameter: The parameter; frozen ones stay so.
        name: Its name, for the message.
        reason: The end of a sentence that begins with what happened.

    Returns:
        A handle, or ``None`` for a parameter that can't have gradients.

    Raises:
        GradientError: In backward, naming the parameter.
    """
    if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
        return None

    def refuse(_: nn.Parameter) -> None:
        msg = f"Parameter '{name}' got a gradient, {reason}"
        raise GradientError(msg)

    is_frozen = not parameter.requires_grad
    if is_frozen:  # torch takes hooks of what requires a gradient only, and keeps them when that ends
        parameter.requires_grad = True
    handle = parameter.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    if is_frozen:
        parameter.requires_grad = False
    return handle


def raise_for_unused(unused: Sequence[str]) -> None:
    """Raise on every rank if parameters took no part in backward on any.

    Args:
        unused: Names of this rank's.

    Raises:
        GradientError: Naming them for each rank.

    Collective: every rank of the world.
    """
    every = collectives.all_gather_object(unused)
    if any(every):
        listed = "; ".join(
            f"rank {rank}: {', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
            for rank, names in enumerate(every)
            if names
        )
        msg = (
            f"Parameters took no part in backward, which `unused='raise'` forbids. {listed}. Freeze them, leave "
            "them out of the optimizer, or pass `unused='zero'`."
        )
        raise GradientError(msg)


def not_optimized(name: str) -> ConfigError:
    """Return the error for a gradient that the boosted optimizer does not step with."""
    return ConfigError(
        f"The gradient of '{name}' can't be set: the boosted optimizer does not hold the parameter. Pass the optimizer "
        "with the model to `boost`, and list the parameter in it."
    )


_REMEDY = (
    "After backward, gradients are averaged: clip by `optimizer.clip_grad_by_value` or `optimizer.clip_grad_by_norm`, "
    "change them otherwise by `booster_runtime.full_gradient` and `set_full_gradient`, and step with the optimizer "
    "that `boost` returned."
)


def watch_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]], *, num_own: int = 0) -> None:
    """Let a script's hooks on parameters raise in backward where what they do to a gradient is not linear.

    To be called before each forward: the script may have registered hooks since.

    Args:
        parameters: The trained parameters and their names.
        num_own: How many hooks after accumulation the strategy has on each.
    """
    if dist.get_world_size() > 1:
        for name, parameter in parameters:
            if parameter._backward_hooks:  # noqa: SLF001 - there is no public way to see hooks
                _watch(parameter._backward_hooks, _OnGradient, name)  # noqa: SLF001
            hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks and len(hooks) > num_own:
                _watch(hooks, _OnParameter, name)


def _watch(hooks: MutableMapping[int, Any], kind: Callable[[Any, str], Any], name: str) -> None:
    for key, hook in hooks.items():
        if not (getattr(hook, "__module__", None) or "").startswith("booster_"):
            hooks[key] = kind(hook, name)


class _OnGradient:
    """A hook of ``register_hook``, which returns another gradient.

    Args:
        hook: The hook.
        name: The parameter's name.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None], name: str) -> None:
        self._hook, self._name = hook, name

    def __call__(self, gradient: Tensor) -> Tensor | None:
        result = self._hook(gradient)
        if result is not None and not _is_linear(self._hook, gradient, result):
            raise _refused(self._hook, self._name)
        return result


class _OnParameter:
    """A hook of ``register_post_accumulate_grad_hook``, which may change the gradient in place, or step with it.

    Args:
        hook: The hook.
        name: The parameter's name.
    """

    def __init__(self, hook: Callable[[Tensor], None], name: str) -> None:
        self._hook, self._name = hook, name

    def __call__(self, parameter: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            gradient = parameter.grad
        if type(gradient) is not torch.Tensor:  # another class refuses to be read
            self._hook(parameter)
            return
        before, versions = gradient.detach().clone(), _versions(parameter, gradient)
        self._hook(parameter)
        result = parameter.grad
        if result is gradient and _versions(parameter, gradient) == versions:
            return  # it was only read

        def change(other: Tensor) -> Tensor | None:
            parameter.grad = other.clone()
            self._hook(parameter)
            return parameter.grad

        has_stepped = _versions(parameter) != versions[:1]
        if result is None or has_stepped or not _is_linear(change, before, result):
            raise _refused(self._hook, self._name)
        parameter.grad = result


def _versions(*tensors: Tensor) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - there is no public name


def _is_linear(hook: Callable[[Tensor], Tensor | None], gradient: Tensor, result: Tensor) -> bool:
    """Return whether what a hook makes of a gradient scales with that, and of a sum it makes the sum.

    It may add a constant, such as a decay of the parameter, which the average of all ranks has once, too.
    """
    with torch.no_grad():
        added = hook(torch.zeros_like(gradient))
        if added is None:
            return False
        if not added.is_sparse:
            added = added.nan_to_num(0.0, 0.0, 0.0)  # of what divides by the gradient's norm
        if not _is_close(hook(-0.5 * gradient), -0.5 * result + 1.5 * added):
            return False
        if gradient.is_sparse or not gradient.dim():
            return True
        other = gradient.flip(*range(gradient.dim()))
        of_other = hook(other)
        return of_other is not None and _is_close(hook(0.5 * (gradient + other)), 0.5 * (result + of_other))


def _is_close(found: Tensor | None, expected: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding; what is not finite is not compared."""
    if found is None or not expected.numel():
        return found is not None
    found, expected = (each.to_dense() if each.is_sparse else each for each in (found, expected))
    difference = (found - expected).abs().max()
    return not bool(difference > 16 * torch.finfo(expected.dtype).eps * expected.abs().max())


def _refused(hook: object, name: str) -> GradientError:
    hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return GradientError(
        f"The hook `{hook_name}` of parameter '{name}' is not linear in the gradient, or steps. It sees the gradient "
        f"of this rank's samples before ranks average it, and would train another model than one process. {_REMEDY}"
    )
