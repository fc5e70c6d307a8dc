"""Errors for gradients that nobody would reduce, and for parameters that have none.

Without the first, each rank would train a model of its own.

Frozen parameters are watched too: a hook costs nothing until its parameter has been unfrozen and gets a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import GradientError
from booster_core.state import NamedTensors
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

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
