"""What calls of Accelerate, Fabric and DeepSpeed are called here, for the errors of scripts written for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_BOOST = "call `model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)`"
_CLIP = "call `optimizer.clip_grad_by_norm(max_norm)` of the boosted optimizer, after `backward`"
_STEP = "call `booster.backward(loss, optimizer)`, `optimizer.step()` and `optimizer.zero_grad()`"
_SAVE = "call `booster.save_checkpoint(path, step=step, model=model, optimizer=optimizer)`"
INSTEAD = {
    "backward": _STEP,
    "clip_grad_norm_": _CLIP,
    "clip_gradients": _CLIP,
    "gather": "call `booster.gather_for_metrics(values, dataloader)`",
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster.join(batches)`",
    "prepare": _BOOST,
    "profile": "call `booster_tools.profile(booster, folder)`",
    "save_checkpoint": _SAVE,
    "save_state": _SAVE,
    "setup": _BOOST,
    "step": _STEP,
    "unwrap_model": "call `booster.unwrap(model)`; `booster.save_model(model, path)` saves it",
    "wait_for_everyone": "call `DistCoordinator().block_all()`",
}
OF_ENGINES = {"backward", "save_checkpoint", "step"}
"""Those of a boosted model; DeepSpeed's engine has them."""


class Remedies:
    """Names the call to make in place of an attribute that another library's object has."""

    if not TYPE_CHECKING:  # type checkers find names that are not there by themselves
        # `__getattr__` is also called for an AttributeError inside a property, and isn't told which one it was.
        def __getattribute__(self, name: str) -> Any:
            try:
                return super().__getattribute__(name)
            except AttributeError:
                if any(name in vars(kind) for kind in type(self).__mro__):
                    raise
            raise no_attribute(self, name)


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there.

    Collective: none.
    """
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`{instead}.", name=name, obj=owner)
