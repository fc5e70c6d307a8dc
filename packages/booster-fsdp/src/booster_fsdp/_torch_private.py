"""What is used of torch's FSDP beyond its public interface: groups of parameters, and gradients before reduction.

Versions of torch differ in these, so `check_internals` compares them with what is expected here, where a model is
boosted. Otherwise gradients could be lost without a word.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.fsdp import FSDPModule

_OF_ROOTS = ("_is_root", "_root_post_backward_final_callback")
"""Only before torch 2.15."""
_OF_GROUPS = (
    "_all_gather_result",
    "_init_mp_dtypes",
    "_partial_reduce_output",
    "_post_forward_indices",
    "_sharded_state",
    "_training_state",
    "all_reduce_grads",
    "fsdp_params",
    "post_backward",
    "post_forward",
    "pre_forward",
    "reduce_grads",
    "wait_for_unshard",
)
_OF_STATES = (
    "_comm_ctx",
    "_pre_backward",
    "_state_ctx",
    "_training_state",
)
_OF_PARAMETERS = (
    "_param_fqn",
    "all_gather_outputs",
    "reset_sharded_param",
    "sharded_param",
    "unsharded_accumulated_grad",
    "unsharded_param",
)


not_compiled = _disable_dynamo
"""Return a function that is not compiled, nor what it calls."""
graph_task = torch._C._current_graph_task_id  # noqa: SLF001 - the number of the backward of this thread, or -1


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs, whose tensors are wrapped and may not be kept."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def groups_of(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's groups of the parameters of a sharded module."""
    state = module._get_fsdp_state()  # noqa: SLF001 - see the module's docstring; also below
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was only one
        groups = [state._fsdp_param_group]  # noqa: SLF001
    yield from (group for group in groups if group is not None)


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


def trained_of(modules: Iterable[FSDPModule]) -> dict[str, bool]:
    """Return which parameters of sharded modules are trained, by name."""
    held = (inner for module in modules for group in groups_of(module) for inner in group.fsdp_params)
    return {str(inner._param_fqn): inner.sharded_param.requires_grad for inner in held}  # noqa: SLF001


def check_internals(modules: Sequence[FSDPModule]) -> None:
    """Check that torch's FSDP is as expected.

    Raises:
        ConfigError: If it is not: gradients could be wrong.
    """
    found = next(_differences(modules), None)
    if found is not None:
        msg = (
            f"booster-fsdp does not know the FSDP of torch {torch.__version__}: {found}. Its gradients could be wrong. "
            "Use a version of torch from 2.11 to 2.15, or a later release of booster-fsdp."
        )
        raise ConfigError(msg)


def take_formats(group: Any) -> None:
    """Let a group whose parameters were all frozen take the formats of its gradients, once one has been unfrozen."""
    if getattr(group, "_orig_dtype", None) is None:
        group._init_mp_dtypes()  # noqa: SLF001


def plain_of(method: Any) -> Any:
    """Return a hook of torch's FSDP without its decorator, which asks the compiler to leave it alone, in each call."""
    plain = getattr(method, "__wrapped__", None)
    return method if plain is None else functools.partial(plain, method.__self__)


def leave_alone(module: FSDPModule) -> None:
    """Ask the compiler once to leave alone what torch's FSDP does for a module, as torch does each time.

    Each time, that costs a fifth of the calls of Python that FSDP makes for a unit.
    """
    state: Any = module._get_fsdp_state()  # noqa: SLF001
    state._pre_backward = not_compiled(plain_of(state._pre_backward))  # noqa: SLF001
    for hooks in (vars(module)["_forward_pre_hooks"], vars(module)["_forward_hooks"]):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state:
                hooks[key] = not_compiled(plain_of(hook))
    for group in groups_of(module):
        group.pre_backward, group.post_backward = plain_of(group.pre_backward), plain_of(group.post_backward)


def gathered_of(inner: Any) -> Any:
    """Return the tensor that a parameter is gathered into; ``None`` if its unit has never run."""
    return getattr(inner, "_unsharded_param", None)


def forget_gathered(inner: Any) -> None:
    """Let a parameter be gathered into another tensor the next time."""
    del inner._unsharded_param  # noqa: SLF001
    inner.all_gather_outputs = []


def gathered_units(units: Sequence[tuple[FSDPModule, Any]]) -> list[tuple[FSDPModule, Any]]:
    """Return the modules and groups whose parameters are gathered, or are being gathered."""
    whole = ShardedState.SHARDED
    return [
        unit
        for unit in units
        if unit[1]._sharded_state is not whole or unit[1]._all_gather_result is not None  # noqa: SLF001
    ]


def unreduced_gradient(inner: Any, whole: Any) -> torch.Tensor | None:
    """Return the gradient of a parameter that is not reduced yet; ``whole`` is what `gathered_of` returns."""
    if whole is None:
        return None
    apart: torch.Tensor | None = inner.unsharded_accumulated_grad  # of `no_sync`
    gradient: torch.Tensor | None = whole.grad
    return gradient if apart is None else apart


def has_unreduced(group: Any) -> bool:
    """Return whether a group's parameters have gradients that are not reduced yet."""
    return any(unreduced_gradient(inner, gathered_of(inner)) is not None for inner in group.fsdp_params)


def was_written(inner: Any, whole: Any) -> bool:
    """Return whether a script has written to a gathered parameter in place, or has given it other memory."""
    # As autograd notices it: torch's gathers, which write to the memory of their outputs, leave it at zero.
    return bool(whole._version) or whole.data_ptr() != inner.all_gather_outputs[0].data_ptr()  # noqa: SLF001


def drop_gradient(inner: Any) -> None:
    """Drop the gradient of a parameter that is not reduced yet, if there is one."""
    if _keeps_apart(inner):
        inner.unsharded_accumulated_grad = None
    whole = gathered_of(inner)
    if whole is not None:
        whole.grad = None


def fill_gradients(gathered: Sequence[tuple[Any, Any]]) -> None:
    """Set the missing gradients of a unit's parameters, and what they are gathered into, to zero."""
    # Under `no_sync`, torch before 2.15 accumulates in the reduction's dtype; all gradients of a unit need the same.
    summed = next((apart for apart in (_apart(inner) for inner, _ in gathered) if apart is not None), None)
    for inner, whole in gathered:
        if unreduced_gradient(inner, whole) is None:
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


def states_of(modules: Iterable[FSDPModule]) -> list[Any]:
    """Return torch's states of sharded modules."""
    return [module._get_fsdp_state() for module in modules]  # noqa: SLF001


def was_interrupted(states: Iterable[Any]) -> bool:
    """Return whether a forward or backward of modules with these states raised, or is under way."""
    for state in states:  # noqa: SIM110 - a generator would be a call for each module
        if state._training_state is not TrainingState.IDLE:  # noqa: SLF001
            return True
    return False


def forget_interrupted(modules: Iterable[FSDPModule]) -> None:
    """Let torch forget that a forward or backward of these modules has begun, which raised; gradients stay."""
    for module in modules:
        state: Any = module._get_fsdp_state()  # noqa: SLF001
        state._training_state = TrainingState.IDLE  # noqa: SLF001
        state._state_ctx.iter_forward_root = None  # noqa: SLF001
        state._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001
        getattr(state._comm_ctx, "post_forward_order", []).clear()  # noqa: SLF001 - made by the first forward
        for group in groups_of(module):
            group._training_state = TrainingState.IDLE  # noqa: SLF001
            group._post_forward_indices.clear()  # noqa: SLF001


def is_in_backward(group: Any) -> bool:
    """Return whether backward has come to a group, and has not ended since."""
    return group._training_state is TrainingState.PRE_BACKWARD  # noqa: SLF001


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


def _lacking(found: Any, names: Sequence[str]) -> Iterator[str]:
    # A property may have no value before the first forward.
    missing = (name for name in names if not hasattr(found, name) and not hasattr(type(found), name))
    yield from (f"its `{type(found).__name__}` has no `{name}`" for name in missing)


def _keeps_apart(inner: Any) -> bool:
    """Return whether torch, before 2.15, accumulates gradients in a tensor of its own rather than in ``grad``."""
    return "unsharded_accumulated_grad" in vars(inner)


def _apart(inner: Any) -> Any:
    return inner.unsharded_accumulated_grad if _keeps_apart(inner) else None
