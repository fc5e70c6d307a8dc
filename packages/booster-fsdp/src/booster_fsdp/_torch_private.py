"""What is used of torch's FSDP beyond its public interface: groups of parameters, and gradients before reduction.

Versions of torch differ in these, so `check_internals` compares them with what is expected here, where a model is
boosted. Otherwise gradients could be lost without a word.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.fsdp import FSDPModule

_OF_ROOTS = ("_is_root", "_root_post_backward_final_callback")
"""Only before torch 2.15."""
_OF_STATES = ("_pre_backward", "_register_pre_backward_hook")
_OF_GROUPS = (
    "_all_gather_result",
    "_init_mp_dtypes",
    "_partial_reduce_output",
    "all_reduce_grads",
    "fsdp_params",
    "is_sharded",
    "is_unsharded",
    "post_backward",
    "post_forward",
    "pre_backward",
    "pre_forward",
    "reduce_grads",
    "reshard_after_backward",
    "wait_for_unshard",
)
_OF_PARAMETERS = ("_module_info", "_param_fqn", "_setattr_on_modules", "reset_sharded_param", "sharded_param")


def groups_of(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's groups of the parameters of a sharded module."""
    state = module._get_fsdp_state()  # noqa: SLF001 - see the module's docstring; also below
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was only one
        groups = [state._fsdp_param_group]  # noqa: SLF001
    yield from (group for group in groups if group is not None)


def held_parameters(group: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Yield the module that holds each parameter of a group, its name there, and torch's object for it."""
    for inner in group.fsdp_params:
        yield inner._module_info.module, inner._module_info.param_name, inner  # noqa: SLF001


def calls_dispatch_of_subclasses() -> bool:
    """Return whether torch calls what subclasses of `DTensor` say on operations; 2.10 does not."""
    dispatch: Any = DTensor.__torch_dispatch__
    try:
        dispatch(torch.ops.aten.detach.default, ())
    except NotImplementedError:
        return False
    except Exception:  # noqa: BLE001 - there is no tensor
        return True
    return True


def transforms_are_active() -> bool:
    """Return whether a transform of ``torch.func`` is running what is called now."""
    return bool(torch._C._are_functorch_transforms_active())  # noqa: SLF001 - no public name


def finish_gather(group: Any) -> None:
    """End the gather of a group that was begun ahead of a forward that has not come, so that it can be resharded."""
    if group._all_gather_result is not None:  # noqa: SLF001
        group.wait_for_unshard()


def show_rows(group: Any) -> None:
    """Let modules hold the sharded parameters of a group, which stays gathered if it is."""
    for inner in group.fsdp_params:
        inner._setattr_on_modules(inner.sharded_param)  # noqa: SLF001


def show_gathered(group: Any) -> None:
    """Let modules hold the gathered parameters of a group, if it is gathered."""
    if group.is_unsharded:
        for inner in group.fsdp_params:
            inner._setattr_on_modules(inner._unsharded_param)  # noqa: SLF001


def gathered_parameters(group: Any) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yield torch's object for each parameter of a group, and the gathered parameter, if it was ever gathered."""
    for inner in group.fsdp_params:
        gathered = getattr(inner, "_unsharded_param", None)
        if gathered is not None:
            yield inner, gathered


def replace_parameters(modules: Iterable[FSDPModule], make: Callable[[Any], torch.nn.Parameter]) -> None:
    """Register other parameters in place of those that torch has created, over the same memory.

    Args:
        modules: The sharded modules.
        make: Returns what takes the place of a parameter.
    """
    for module in modules:
        for group in groups_of(module):
            for inner in group.fsdp_params:
                inner._setattr_on_modules(make(inner.sharded_param))  # noqa: SLF001
    take_parameters(modules)


def take_parameters(modules: Iterable[FSDPModule]) -> None:
    """Tell torch about parameters that were registered in place of those it created."""
    # Where a user has asked for swapped parameters, torch takes others for a fault.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        for module in modules:
            for group in groups_of(module):
                for inner in group.fsdp_params:
                    inner.reset_sharded_param()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def check_internals(modules: Sequence[FSDPModule]) -> None:
    """Check that torch's FSDP is as expected.

    Raises:
        ConfigError: If it is not: gradients could be wrong.
    """
    found = next(_differences(modules), None)
    if found is not None:
        msg = (
            f"booster-fsdp does not know the FSDP of torch {torch.__version__}: {found}. Its gradients could be wrong. "
            "Use a version of torch from 2.10 to 2.15, or a later release of booster-fsdp."
        )
        raise ConfigError(msg)


def take_formats(group: Any) -> None:
    """Let a group whose parameters were all frozen take the formats of its gradients, once one has been unfrozen."""
    if getattr(group, "_orig_dtype", None) is None:
        group._init_mp_dtypes()  # noqa: SLF001


def gradient_of(inner: Any) -> torch.Tensor | None:
    """Return the gradient of a gathered parameter that is not reduced yet."""
    apart: torch.Tensor | None = _apart(inner)
    return inner._unsharded_param.grad if apart is None else apart  # noqa: SLF001


def has_gradients(group: Any) -> bool:
    """Return whether gathered parameters of a group have gradients that are not reduced yet."""
    return any(gradient_of(inner) is not None for inner, _ in gathered_parameters(group))


def drop_gradient(inner: Any) -> None:
    """Drop the gradient of a parameter that is not reduced yet, if there is one."""
    if _keeps_apart(inner):
        inner.unsharded_accumulated_grad = None
    whole = getattr(inner, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None


def fill_gradients(gathered: Sequence[Any]) -> None:
    """Set the missing gradients of a unit's gathered parameters to zero."""
    # Under `no_sync`, torch before 2.15 accumulates in the reduction's dtype; all gradients of a unit need the same.
    summed = next((apart for apart in map(_apart, gathered) if apart is not None), None)
    for inner in gathered:
        whole = inner._unsharded_param  # noqa: SLF001
        if gradient_of(inner) is None:
            # Since torch 2.15, that of accumulated gradients differs from the parameter's.
            whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        if summed is not None and _apart(inner) is None:
            inner.unsharded_accumulated_grad = whole.grad.to(summed.dtype)
            whole.grad = None


def reduce_accumulated(root: FSDPModule) -> None:
    """Let torch reduce gradients that were accumulated without reduction, if it has seen the model itself run.

    Args:
        root: The sharded model; its units reduce gradients.

    Collective: every rank of the world.
    """
    if not hasattr(root, "finalize_backward"):  # before torch 2.15
        state: Any = root._get_fsdp_state()  # noqa: SLF001
        if state._is_root:  # noqa: SLF001 - else torch has only seen a part of the model run
            # As at the end of a backward that used no unit.
            state._root_post_backward_final_callback()  # noqa: SLF001
        return
    finalizing: Any = root
    finalizing.set_manual_backward_finalization(True)
    try:
        finalizing.finalize_backward()
    finally:
        finalizing.set_manual_backward_finalization(False)


def _differences(modules: Sequence[FSDPModule]) -> Iterator[str]:
    """Yield what differs from what is expected."""
    if not hasattr(modules[0], "finalize_backward"):
        yield from _lacking(modules[0]._get_fsdp_state(), _OF_ROOTS)  # noqa: SLF001
    for module in modules:
        yield from _lacking(module._get_fsdp_state(), _OF_STATES)  # noqa: SLF001
        for group in groups_of(module):
            yield from _lacking(group, _OF_GROUPS)
            for inner in group.fsdp_params:
                yield from _lacking(inner, _OF_PARAMETERS)
                yield from _kept_elsewhere(inner)


def _lacking(found: Any, names: Sequence[str]) -> Iterator[str]:
    yield from (f"its `{type(found).__name__}` has no `{name}`" for name in names if not hasattr(found, name))


def _kept_elsewhere(inner: Any) -> Iterator[str]:
    """Ask the properties of a parameter's class about an object that stands in for one that is gathered."""
    whole = SimpleNamespace(grad=object())
    stand_in = SimpleNamespace(_unsharded_param=whole)
    kind = type(inner)
    if _asked(kind, "unsharded_param", stand_in) is not whole:
        yield f"its `{kind.__name__}` keeps no gathered parameter as `_unsharded_param`"
    if not _keeps_apart(inner) and _asked(kind, "unsharded_accumulated_grad", stand_in) is not whole.grad:
        yield f"its `{kind.__name__}` accumulates gradients neither apart nor as `grad`"


def _asked(kind: type, name: str, stand_in: SimpleNamespace) -> Any:
    """Return a property's value for an object that stands in; ``None`` if it has none."""
    asked = getattr(kind, name, None)
    try:
        return asked.fget(stand_in) if isinstance(asked, property) and asked.fget else None
    except AttributeError:
        return None


def _keeps_apart(inner: Any) -> bool:
    """Return whether torch, before 2.15, accumulates gradients in a tensor of its own rather than in ``grad``."""
    return "unsharded_accumulated_grad" in vars(inner)


def _apart(inner: Any) -> Any:
    return inner.unsharded_accumulated_grad if _keeps_apart(inner) else None
