"""What to call in place of an attribute that is not there: functions of other packages, and other libraries' names."""

from __future__ import annotations

_BOOST = "call `model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)`"
_CLIP = "call `optimizer.clip_grad_by_norm(max_norm)` of the boosted optimizer, after `backward`"
_STEP = "call `booster.backward(loss, optimizer)`, `optimizer.step()` and `optimizer.zero_grad()`"
_SAVE = "call `booster.save_checkpoint(path, step=step, model=model, optimizer=optimizer)`"
_LOAD = "call `booster.load_checkpoint(path, model=model, optimizer=optimizer)`"
_TRACK = "call `booster_tools.track(optimizer, ...)`"
_FIRST = "write `with booster.context.coordinator.priority_execution():`"
_SKIP = "pass the data loader to `save_checkpoint` and `load_checkpoint`: it goes on at the sample after the last"
_STOP = "use `booster_runtime.StopSignal`, which all ranks see alike"
_PRECISION = "pass `mixed_precision` to Booster: the boosted model's forward runs in it"
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
    # of Accelerate, Fabric and DeepSpeed, whose pages promise each call in the first column of a table
    "all_gather": _function("booster_runtime", "gather_for_metrics", "values, dataloader"),
    "all_reduce": _function("booster_runtime", "reduce", "values"),
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
    "gather": _function("booster_runtime", "gather_for_metrics", "values, dataloader"),
    "get_state_dict": "call `booster.save_model(model, path)`, which writes the whole model without gathering it",
    "global_rank": "ask `DistCoordinator().rank`",
    "init_module": "write `with LazyInitContext():`",
    "init_tensor": "write `with torch.device(booster.device):`",
    "init_trackers": _TRACK,
    "is_global_zero": "ask `DistCoordinator().is_master()`",
    "is_last_process": "ask `DistCoordinator().is_last_process()`",
    "is_local_main_process": "ask `DistCoordinator().is_node_master()`",
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster_runtime.join(booster, batches)`",
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
    "sync_gradients": "write `with booster_runtime.accumulate(booster, model, n, loader) as is_last:`",
    "unwrap_model": "call `booster.unwrap(model)`; `booster.save_model(model, path)` saves it",
    "wait_for_everyone": "call `DistCoordinator().block_all()`",
    "world_size": "ask `DistCoordinator().world_size`",
}
OF_ENGINES = {"backward", "save_checkpoint", "step"}
"""Those that a script looks for at a boosted model, because DeepSpeed's engine has them."""


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there, with what to call in its place."""
    instead = f"; {HINTS[name]}" if name in HINTS else ""
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`{instead}.", name=name, obj=owner)
