"""What calls of other libraries are called here, for the error of a script that was written for one of them."""

from __future__ import annotations

_STEP = "call `booster.backward(loss, optimizer)`, `optimizer.step()` and `optimizer.zero_grad()`"
_ACCUMULATE = "run all but the last micro-batch under `booster.no_sync(model)`, divide losses, and step after the last"
_WAIT = "call `DistCoordinator().block_all()`"
_CLIP = "call `optimizer.clip_grad_by_norm(max_norm)` of the boosted optimizer, after `backward`"
_BOOST = "call `model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)`"

OF_BOOSTER = {
    "accumulate": _ACCUMULATE,
    "no_backward_sync": "use `booster.no_sync(model)`",
    "prepare": _BOOST,
    "setup": _BOOST,
    "initialize": _BOOST,
    "setup_dataloaders": "pass the data loader to `booster.boost`, or call `booster.prepare_dataloader(dataset)`",
    "clip_grad_norm_": _CLIP,
    "clip_gradients": _CLIP,
    "unwrap_model": "call `model.unwrap()`; `booster.save_model(model, path)` saves it",
    "wait_for_everyone": _WAIT,
    "barrier": _WAIT,
    "gather": "call `booster.gather_for_metrics(values, dataloader)`",
    "save_state": "call `booster.save_checkpoint(path, step=step, model=model, optimizer=optimizer)`",
    "load_state": "call `booster.load_checkpoint(path, model=model, optimizer=optimizer)`",
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster.join(batches)`",
}
"""What to do in place of calls of Accelerate's ``Accelerator``, Fabric and DeepSpeed, by their names."""

OF_MODEL = {
    "backward": _STEP,
    "step": _STEP,
    "save_checkpoint": "call `booster.save_model(model, path)`, or `booster.save_checkpoint` for the whole state",
}
"""What to do in place of calls of DeepSpeed's engine."""


def no_attribute(owner: object, name: str, instead: str) -> AttributeError:
    """Return the error for an attribute that another library has.

    Collective: none.
    """
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`; {instead}.", name=name, obj=owner)
