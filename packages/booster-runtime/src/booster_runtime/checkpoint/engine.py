"""`CheckpointEngine`: what `Booster` saves and loads with, at paths and URLs.

Files are read and written by `CheckpointFiles`, at local paths. What is at a URL is written to and read from a local
copy (`booster_runtime.checkpoint.remote`); whole training states have an order of their own
(`booster_runtime.checkpoint.run.training_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.checkpoint_io import CheckpointIO
from booster_runtime.checkpoint.checkpoint_files import CheckpointFiles
from booster_runtime.checkpoint.remote import local_source, local_target
from booster_runtime.checkpoint.run.facts import run_facts
from booster_runtime.checkpoint.run.training_state import has_training_state, load_training_state, save_training_state
from booster_runtime.checkpoint.save.adapters import adapted_model, save_adapters
from booster_runtime.ema import ExponentialAverage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.checkpoint_io import LoadedCheckpoint, LoadReport, MovingAverage, TrainingState
    from booster_core.plugin import BoostContext, Plugin
    from booster_core.state import StateAdapter


class CheckpointEngine(CheckpointIO):
    """Reads and writes the layouts of Hugging Face libraries, of ``torch.save`` and of torch's distributed checkpoints.

    Args:
        plugin: The plugin of the run.
        context: Ranks, precision and timeout of the run.
    """

    def __init__(self, plugin: Plugin, context: BoostContext) -> None:
        super().__init__(plugin, context)
        self.files = CheckpointFiles(context.coordinator, timeout_seconds=context.timeout_seconds)

    def save_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - as for `Booster.save_model`
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
        *,
        module: nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        with local_target(self.context.coordinator, checkpoint, "save_model", use_async=use_async) as path:
            self.files.save_model(
                adapter,
                path,
                shard,
                gather_dtensor,
                prefix,
                size_per_shard,
                use_safetensors,
                use_async,
                module=module,
                dtype=dtype,
            )

    def load_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - as for `Booster.load_model`
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        module: nn.Module | None = None,
    ) -> LoadReport:
        with local_source(self.context.coordinator, checkpoint, "model") as path:
            return self.files.load_model(adapter, path, strict, low_cpu_mem_mode, num_threads, module=module)

    def save_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - as for `Booster.save_optimizer`
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        with local_target(self.context.coordinator, checkpoint, "save_optimizer", use_async=use_async) as path:
            self.files.save_optimizer(adapter, path, shard, gather_dtensor, prefix, size_per_shard, use_async)

    def load_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - as for `Booster.load_optimizer`
        num_threads: int = 1,
    ) -> None:
        with local_source(self.context.coordinator, checkpoint, "optimizer") as path:
            self.files.load_optimizer(adapter, path, low_cpu_mem_mode, num_threads)

    def save_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        with local_target(self.context.coordinator, checkpoint, "save_lr_scheduler") as path:
            self.files.save_lr_scheduler(scheduler, path)

    def load_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        with local_source(self.context.coordinator, checkpoint, "lr_scheduler") as path:
            self.files.load_lr_scheduler(scheduler, path)

    def save_adapters(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        *,
        module: nn.Module,
        selected: Sequence[str] | None,
        use_safetensors: bool,
        dtype: torch.dtype | None,
    ) -> None:
        adapted = adapted_model(module)
        with local_target(self.context.coordinator, checkpoint, "save_lora_as_pretrained") as path:
            save_adapters(
                self.files,
                adapted,
                adapter,
                path,
                selected=selected,
                use_safetensors=use_safetensors,
                dtype=dtype,
            )

    def save_training_state(
        self,
        make_state: Callable[[], TrainingState],
        root: str | Path,
        *,
        step: int,
        extra: Any,
        keep_last: int | None,
        use_async: bool,
        size_per_shard: int,
    ) -> None:
        save_training_state(
            self.files,
            self.context.coordinator,
            make_state,
            root,
            facts=run_facts(self.plugin, self.context),
            step=step,
            extra=extra,
            keep_last=keep_last,
            use_async=use_async,
            size_per_shard=size_per_shard,
            timeout_seconds=self.context.timeout_seconds,
        )

    def load_training_state(
        self,
        make_state: Callable[[], TrainingState],
        root: str | Path,
        *,
        step: int | str,
        strict: bool,
        verify: bool,
        num_threads: int,
    ) -> LoadedCheckpoint:
        return load_training_state(
            self.files,
            self.context.coordinator,
            make_state,
            root,
            step=step,
            strict=strict,
            verify=verify,
            num_threads=num_threads,
            timeout_seconds=self.context.timeout_seconds,
        )

    def has_training_state(self, root: str | Path) -> bool:
        return has_training_state(self.context.coordinator, root)

    def average(self, model: nn.Module, decay: float, make_adapter: Callable[[], StateAdapter]) -> MovingAverage:
        return ExponentialAverage(model, decay, make_adapter, self)

    def wait(self) -> None:
        self.files.wait()

    def when_written(self, call: Callable[[], object]) -> None:
        self.files.when_written(call)

    def close(self) -> None:
        """Wait for a save in the background, and release the memory that snapshots are kept in.

        Collective: every rank.
        """
        self.files.close()
