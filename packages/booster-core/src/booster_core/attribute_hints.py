"""What to call in place of an attribute that is not there: functions of other packages, and other libraries' names."""

from __future__ import annotations

_BOOST = "call `model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)`"
_CLIP = "call `optimizer.clip_grad_by_norm(max_norm)` of the boosted optimizer, after `backward`"
_STEP = "call `booster.backward(loss, optimizer)`, `optimizer.step()` and `optimizer.zero_grad()`"
_SAVE = "call `booster.save_checkpoint(path, step=step, model=model, optimizer=optimizer)`"
_COORDINATOR = "booster.context.coordinator"


def _function(package: str, name: str, arguments: str) -> str:
    return f"call `{package}.{name}(booster, {arguments})`"


_IN_RUNTIME = {
    "accumulate": "model, steps",
    "check_replicas": "model",
    "ema": "model",
    "evaluate_batch": "data_iter, model, criterion",
    "full_gradient": "model, name",
    "full_state": "model, name, state",
    "gather_for_metrics": "values, dataloader",
    "gathered": "model, names",
    "join": "batches",
    "reduce": "values",
    "set_full_gradient": "model, name, values",
    "set_full_state": "model, name, state, values",
    "to_device": "batch",
    "train_batch": "data_iter, model, criterion, optimizer",
}
HINTS = {
    **{name: _function("booster_runtime", name, arguments) for name, arguments in _IN_RUNTIME.items()},
    "profile": _function("booster_tools", "profile", "folder"),
    "print": f"call `{_COORDINATOR}.print_on_master(...)`",
    "main_process_first": f"enter `{_COORDINATOR}.priority_execution()`",
    # of Accelerate, Fabric and DeepSpeed
    "backward": _STEP,
    "clip_grad_norm_": _CLIP,
    "clip_gradients": _CLIP,
    "gather": _function("booster_runtime", "gather_for_metrics", "values, dataloader"),
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster_runtime.join(booster, batches)`",
    "prepare": _BOOST,
    "save_checkpoint": _SAVE,
    "save_state": _SAVE,
    "setup": _BOOST,
    "step": _STEP,
    "unwrap_model": "call `booster.unwrap(model)`; `booster.save_model(model, path)` saves it",
    "wait_for_everyone": "call `DistCoordinator().block_all()`",
}
OF_ENGINES = {"backward", "save_checkpoint", "step"}
"""Those that a script looks for at a boosted model, because DeepSpeed's engine has them."""


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there, with what to call in its place."""
    instead = f"; {HINTS[name]}" if name in HINTS else ""
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`{instead}.", name=name, obj=owner)
