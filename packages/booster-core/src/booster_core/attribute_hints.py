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
_ACCUMULATE = "write `with booster_runtime.accumulate(booster, model, n, loader) as is_last:`"
_STATE = "pass what a run saves and loads to `booster.register_for_checkpointing(...)`"
_TRAINING = "call `booster_runtime.train_batch(booster, data_iter, model, criterion, optimizer)`"
_LOADER = "pass options to the data loader, which `boost` splits; `join` and `drop_last` are for uneven ends"
_PLUGIN = "options are those of the plugin: ask `booster.plugin` and `booster.describe()`"
_COORDINATES = "ask `booster.plugin.coordinates` of the hybrid plugin, by axis: `dp`, `pp`, `sp`, `tp`"
_BATCH = "ask the data loader for its batch size, which counts samples of a rank"
_FOLDER = "pass a folder to `save_checkpoint`, and to `track`"
_SEQUENCES = "pass `sequence_parallelism_mode` to HybridParallelPlugin; batches are passed whole"
_RATE = "ask `optimizer.param_groups`, or the scheduler"


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
    "allreduce_gradients": _STEP,
    "autocast": _PRECISION,
    "backward": _STEP,
    "barrier": "call `DistCoordinator().block_all()`",
    "broadcast": "call `DistCoordinator().broadcast_object(value)`",
    "call": "register a hook by `booster_core.plugin.register_hooks`",
    "check_trigger": _STOP,
    "clear": "delete your references to model and optimizer, and call `torch.cuda.empty_cache()`",
    "clip_grad_norm_": _CLIP,
    "clip_grad_value_": "call `optimizer.clip_grad_by_value(clip_value)` of the boosted optimizer, after `backward`",
    "clip_gradients": _CLIP,
    "context_parallel_rank": _COORDINATES,
    "data_parallel_rank": _COORDINATES,
    "data_parallel_shard_rank": _COORDINATES,
    "deepspeed_io": "call `booster.prepare_dataloader(dataset, batch_size)`",
    "deepspeed_plugin": _PLUGIN,
    "deepspeed_ulysses_dl_adapter": _SEQUENCES,
    "destroy": "call `booster_core.shutdown()` to leave the process group",
    "dispatch_batches": _LOADER,
    "distributed_type": "ask `booster.plugin.name`",
    "end_training": "nothing is to be ended; close what `track` returned, if you track values",
    "eval_batch": "call `booster_runtime.evaluate_batch(booster, data_iter, model, criterion)`",
    "even_batches": _LOADER,
    "fp8_backend": "call `booster_runtime.float8.convert_to_float8(model)` before `boost`",
    "free_memory": "delete your references to model and optimizer, and call `torch.cuda.empty_cache()`",
    "gather": _function("booster_runtime", "gather_for_metrics", "values, dataloader"),
    "get_global_grad_norm": "take what `optimizer.clip_grad_by_norm(max_norm)` returns",
    "get_lr": _RATE,
    "get_state_dict": "call `booster.save_model(model, path)`, which writes the whole model without gathering it",
    "get_tracker": _TRACK,
    "global_rank": "ask `DistCoordinator().rank`",
    "global_samples": "count batches in your loop",
    "global_steps": "count steps in your loop; `load_checkpoint(...).step` is the one of a checkpoint",
    "gradient_accumulation_steps": _ACCUMULATE,
    "init_module": "write `with LazyInitContext():`",
    "init_tensor": "write `with torch.device(booster.device):`",
    "init_trackers": _TRACK,
    "is_composable_parallelism_enabled": _PLUGIN,
    "is_fsdp2": _PLUGIN,
    "is_global_zero": "ask `DistCoordinator().is_master()`",
    "is_gradient_accumulation_boundary": _ACCUMULATE,
    "is_last_process": "ask `DistCoordinator().is_last_process()`",
    "is_local_main_process": "ask `DistCoordinator().is_node_master()`",
    "is_main_process": "ask `DistCoordinator().is_master()`",
    "join_uneven_inputs": "iterate over `booster_runtime.join(booster, batches)`",
    "launch": "call `booster_core.launch()` before the Booster is used, and start the script by torchrun",
    "load": "call `booster.load_model(model, path)` or `booster.load_checkpoint(path, model=model)`",
    "load_checkpoint": _LOAD,
    "load_raw": "call `booster.load_model(model, path)`",
    "load_state": _LOAD,
    "local_main_process_first": _FIRST,
    "local_process_index": "ask `DistCoordinator().local_rank`",
    "local_rank": "ask `DistCoordinator().local_rank`",
    "log": _TRACK,
    "log_dict": _TRACK,
    "logger": _TRACK,
    "loggers": _TRACK,
    "logging_dir": _FOLDER,
    "lomo_backward": _STEP,
    "maybe_context_parallel": _SEQUENCES,
    "micro_steps": "count batches in your loop",
    "mixed_precision": "ask `booster.precision`",
    "multi_device": "ask `DistCoordinator().world_size`",
    "no_backward_sync": "write `with booster.no_sync(model):`",
    "node_rank": "ask `DistCoordinator().is_node_master()` for the first process of a host",
    "non_blocking": _LOADER,
    "num_processes": "ask `DistCoordinator().world_size`",
    "offload_states": 'pass `offload="cpu"` to LowLevelZeroPlugin, or use GeminiPlugin',
    "on_last_process": "write `if DistCoordinator().is_last_process():`",
    "on_local_main_process": "write `if DistCoordinator().is_node_master():`",
    "on_local_process": "write `if DistCoordinator().local_rank == n:`",
    "on_main_process": "decorate with `DistCoordinator().on_master_only()`",
    "on_process": "write `if DistCoordinator().rank == n:`",
    "optimizer_step_was_skipped": "ask `optimizer.found_overflow` after the step",
    "pad_across_processes": "gather by `DistCoordinator().all_gather_object(values)`, which takes tensors of any size",
    "parallelism_config": _PLUGIN,
    "pipeline_parallel_rank": _COORDINATES,
    "prepare": _BOOST,
    "prepare_data_loader": "call `booster.prepare_dataloader(dataset, batch_size)`, or pass the loader to `boost`",
    "prepare_model": _BOOST,
    "prepare_optimizer": _BOOST,
    "prepare_scheduler": _BOOST,
    "process_index": "ask `DistCoordinator().rank`",
    "project_dir": _FOLDER,
    "rank_zero_first": _FIRST,
    "register_load_state_pre_hook": _STATE,
    "register_save_state_pre_hook": _STATE,
    "reload_states": 'pass `offload="cpu"` to LowLevelZeroPlugin, or use GeminiPlugin',
    "save": _SAVE,
    "save_16bit_model": "call `booster.save_model(model, path, shard=True)`",
    "save_checkpoint": _SAVE,
    "save_fp16_model": "call `booster.save_model(model, path, shard=True)`",
    "save_iteration": "ask `booster.load_checkpoint(...).step`",
    "save_state": _SAVE,
    "seed_everything": "pass `seed` to `booster_core.launch`",
    "set_gradient_accumulation_boundary": _ACCUMULATE,
    "set_lr": "set `lr` in `optimizer.param_groups`",
    "set_train_batch_size": _BATCH,
    "set_train_micro_batch_size": _BATCH,
    "set_trigger": _STOP,
    "setup": _BOOST,
    "setup_dataloaders": "pass the loaders to `boost`, or call `booster.prepare_dataloader(dataset, batch_size)`",
    "setup_module": _BOOST,
    "setup_optimizers": _BOOST,
    "sharded_model": "write `with LazyInitContext():`",
    "should_save_model": "call `booster.save_model` on every rank: those that write nothing return",
    "skip_first_batches": _SKIP,
    "split_batches": _LOADER,
    "split_between_processes": "pass the samples to `booster.prepare_dataloader(dataset, batch_size)`",
    "step": _STEP,
    "strategy": _PLUGIN,
    "sync_gradients": _ACCUMULATE,
    "tensor_parallel_rank": _COORDINATES,
    "torch_device_mesh": _COORDINATES,
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "trigger_sync_in_backward": "leave `booster.no_sync(model)` before the last backward of a step",
    "unscale_gradients": "do nothing: `optimizer.clip_grad_by_norm` unscales gradients first",
    "unwrap_model": "call `booster.unwrap(model)`; `booster.save_model(model, path)` saves it",
    "use_distributed": "ask `DistCoordinator().world_size`",
    "use_seedable_sampler": _LOADER,
    "use_stateful_dataloader": _LOADER,
    "verify_device_map": "leave `device_map` out, and build the model in `with LazyInitContext():`",
    "wait_for_everyone": "call `DistCoordinator().block_all()`",
    "world_size": "ask `DistCoordinator().world_size`",
    "zero_optimization_stage": _PLUGIN,
}
_TRACKERS = "pass trackers to `booster_tools.track(optimizer, ...)`"
_CHOICE = 'name a plugin, such as `plugin="fsdp"`, or construct it with options'
_START = "start the script by torchrun or `booster run`, which say how many processes there are"
ARGUMENTS = {
    "accelerator": "pass `device=`; by default it is this process's CUDA device where there is one",
    "callbacks": "register hooks by `booster_core.plugin.register_hooks`",
    "cpu": 'pass `device="cpu"`',
    "dataloader_config": _LOADER,
    "deepspeed_plugin": "pass `plugin=LowLevelZeroPlugin(...)`, or GeminiPlugin for stage 3",
    "deepspeed_plugins": "make a Booster for each model",
    "devices": _START,
    "dynamo_backend": "call `torch.compile` before or after `boost`",
    "dynamo_plugin": "call `torch.compile` before or after `boost`",
    "fsdp_plugin": "pass `plugin=TorchFSDPPlugin(...)`",
    "gradient_accumulation_plugin": _ACCUMULATE,
    "gradient_accumulation_steps": _ACCUMULATE,
    "kwargs_handlers": "options are those of the plugin, the loss scale that of a PrecisionPolicy",
    "log_with": _TRACKERS,
    "loggers": _TRACKERS,
    "megatron_lm_plugin": "pass `plugin=HybridParallelPlugin(...)`",
    "num_nodes": _START,
    "parallelism_config": "pass `plugin=HybridParallelPlugin(...)`",
    "plugins": _CHOICE,
    "precision": "pass `mixed_precision=`",
    "project_config": _FOLDER,
    "project_dir": _FOLDER,
    "rng_types": "do nothing: random states are saved and loaded by `save_checkpoint`",
    "split_batches": "batch sizes count samples of a rank: divide them yourself",
    "step_scheduler_with_optimizer": "step the scheduler that `boost` returned where you step the optimizer",
    "strategy": _CHOICE,
    "torch_tp_plugin": "pass `plugin=HybridParallelPlugin(tp_size=...)`",
}
"""What to do in place of passing an argument of Accelerate's Accelerator or of Fabric to Booster."""
OF_ENGINES = {
    *("allreduce_gradients", "backward", "deepspeed_io", "destroy", "eval_batch", "get_global_grad_norm", "get_lr"),
    *("global_rank", "global_samples", "global_steps", "gradient_accumulation_steps", "local_rank", "micro_steps"),
    *("is_gradient_accumulation_boundary", "load_checkpoint", "offload_states", "reload_states", "save_16bit_model"),
    *("save_checkpoint", "save_fp16_model", "set_gradient_accumulation_boundary", "set_lr", "set_train_batch_size"),
    *("set_train_micro_batch_size", "step", "train_batch", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("world_size", "zero_optimization_stage"),
}
"""Those that a script looks for at a boosted model, because DeepSpeed's engine has them."""


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there, with what to call in its place."""
    instead = f"; {HINTS[name]}" if name in HINTS else ""
    return AttributeError(f"`{type(owner).__name__}` has no `{name}`{instead}.", name=name, obj=owner)
