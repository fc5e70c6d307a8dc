"""What calls of Accelerate, Fabric and DeepSpeed are called here, for the errors of scripts written for one of them.

Their pages in the documentation promise it: a call in the first column of a table is here, if Booster has no such.
"""

from __future__ import annotations

from typing import NoReturn

_BOOST = "call `model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)`"
_CLIP = "call `optimizer.clip_grad_by_norm(max_norm)` of the boosted optimizer, after `backward`"
_STEP = "call `booster.backward(loss, optimizer)`, `optimizer.step()` and `optimizer.zero_grad()`"
_SAVE = "call `booster.save_checkpoint(path, step=step, model=model, optimizer=optimizer)`"
_LOAD = "call `booster.load_checkpoint(path, model=model, optimizer=optimizer)`"
_TRACK = "call `track(optimizer, ...)` of `booster_runtime.tracking`"
_FIRST = "write `with booster.main_process_first():`"
_SKIP = "pass the data loader to `save_checkpoint` and `load_checkpoint`: it goes on at the sample after the last"
_STOP = "use `booster_core.StopSignal`, which all ranks see alike"
_PRECISION = "pass `mixed_precision` to Booster: the boosted model's forward runs in it"
INSTEAD = {
    "all_gather": "call `booster.gather_for_metrics(values, dataloader)`",
    "all_reduce": "call `booster.reduce(values)`",
    "autocast": _PRECISION,
    "backward": _STEP,
    "barrier": "call `DistCoordinator().block_all()`",
    "broadcast": "call `DistCoordinator().broadcast_object(value)`",
    "check_trigger": _STOP,
    "clip_grad_norm_": _CLIP,
    "clip_grad_value_": "call `optimizer.clip_grad_by_value(clip_value)` of the boosted optimizer, after `backward`",
    "clip_gradients": _CLIP,
    "distributed_type": "ask `booster.plugin.name`",
    "end_training": "nothing is to be ended; close what `track` returned, if you track values",
    "free_memory": "delete your references to model and optimizer, and call `torch.cuda.empty_cache()`",
    "gather": "call `booster.gather_for_metrics(values, dataloader)`",
    "get_state_dict": "call `booster.save_model(model, path)`, which writes the whole model without gathering it",
    "global_rank": "ask `DistCoordinator().rank`",
    "init_module": "write `with LazyInitContext():`",
    "init_tensor": "write `with torch.device(booster.device):`",
    "init_trackers": _TRACK,
    "is_global_zero": "ask `DistCoordinator().is_master()`",
    "is_last_process": "ask `DistCoordinator().is_last_process()`",
    "is_local_main_process": "ask `DistCoordinator().is_node_master()`",
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster.join(batches)`",
    "launch": "call `booster_core.launch()` before the Booster is used, and start the script by torchrun",
    "load": "call `booster.load_model(model, path)` or `booster.load_checkpoint(path, model=model)`",
    "load_state": _LOAD,
    "local_main_process_first": _FIRST,
    "local_process_index": "ask `DistCoordinator().local_rank`",
    "local_rank": "ask `DistCoordinator().local_rank`",
    "log": _TRACK,
    "log_dict": _TRACK,
    "mixed_precision": "ask `booster.precision`",
    "no_backward_sync": "write `with booster.no_sync(model):`",
    "num_processes": "ask `DistCoordinator().world_size`",
    "on_main_process": "decorate with `DistCoordinator().on_master_only()`",
    "prepare": _BOOST,
    "prepare_data_loader": "call `booster.prepare_dataloader(dataset, batch_size)`, or pass the loader to `boost`",
    "prepare_model": _BOOST,
    "prepare_optimizer": _BOOST,
    "prepare_scheduler": _BOOST,
    "process_index": "ask `DistCoordinator().rank`",
    "rank_zero_first": _FIRST,
    "save": _SAVE,
    "save_checkpoint": _SAVE,
    "save_state": _SAVE,
    "seed_everything": "pass `seed` to `booster_core.launch`",
    "set_trigger": _STOP,
    "setup": _BOOST,
    "setup_dataloaders": "pass the loaders to `boost`, or call `booster.prepare_dataloader(dataset, batch_size)`",
    "setup_module": _BOOST,
    "setup_optimizers": _BOOST,
    "skip_first_batches": _SKIP,
    "step": _STEP,
    "sync_gradients": "write `with booster.accumulate(model, n, loader) as is_last:`",
    "unwrap_model": "call `booster.unwrap(model)`; `booster.save_model(model, path)` saves it",
    "wait_for_everyone": "call `DistCoordinator().block_all()`",
    "world_size": "ask `DistCoordinator().world_size`",
}
OF_ENGINES = {"backward", "save_checkpoint", "step"}
"""Those of a boosted model; DeepSpeed's engine has them."""


class Remedies:
    """Names the call to make in place of an attribute that another library's object has."""

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name)


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there.

    Collective: none.
    """
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`{instead}.", name=name, obj=owner)
