"""`CheckpointEngine`: what `Booster` saves and loads with, at paths and URLs.

Models, optimizers and schedulers are read and written by `CheckpointFiles`; whole training states have an order of
their own (`booster_checkpoint.run.training_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_checkpoint.checkpoint_files import CheckpointFiles
from booster_checkpoint.run.facts import run_facts
from booster_checkpoint.run.lease import Leases
from booster_checkpoint.run.training_state import has_training_state, load_training_state, save_training_state
from booster_checkpoint.save.adapters import adapted_model, save_adapters
from booster_core.checkpoint_io import CheckpointIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from booster_core.checkpoint_io import LoadedCheckpoint, TrainingState
    from booster_core.plugin import BoostContext, Plugin
    from booster_core.state import StateAdapter


class CheckpointEngine(CheckpointFiles, CheckpointIO):
    """Reads and writes the layouts of Hugging Face libraries, of ``torch.save`` and of torch's distributed checkpoints.

    Args:
        plugin: The plugin of the run.
        context: Ranks, precision and timeout of the run.
    """

    def __init__(self, plugin: Plugin, context: BoostContext) -> None:
        CheckpointFiles.__init__(self, context.coordinator, timeout_seconds=context.timeout_seconds)
        CheckpointIO.__init__(self, plugin, context)
        self._leases = Leases()

    def save_adapters(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        *,
        module: nn.Module,
        selected: Sequence[str] | None,
        use_safetensors: bool,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    ) -> None:
        adapted = adapted_model(module)
        path = self.path_at(checkpoint, "save_lora_as_pretrained")
        save_adapters(self, adapted, adapter, path, selected=selected, use_safetensors=use_safetensors, dtype=dtype)

    def save_training_state(
        self,
        make_state: Callable[[], TrainingState],
        root: str | Path,
        *,
        step: int,
        extra: Any,
        keep_last: int | None,
        keep_every: int | None,
        keep_best: int | None,
        metric: float | None,
        use_async: bool,
        size_per_shard: int,
    ) -> None:
        save_training_state(
            self,
            self._session,
            make_state,
            root,
            leases=self._leases,
            facts=run_facts(self.plugin, self.context),
            step=step,
            extra=extra,
            keep={"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best},
            metric=metric,
            use_async=use_async,
            size_per_shard=size_per_shard,
        )

    def load_training_state(
        self,
        make_state: Callable[[], TrainingState],
        root: str | Path,
        *,
        step: int | str | None,
        resume: bool,
        strict: bool,
        verify: bool,
        num_threads: int,
    ) -> LoadedCheckpoint:
        return load_training_state(
            self,
            self._session,
            make_state,
            root,
            leases=self._leases,
            step=step,
            resume=resume,
            strict=strict,
            verify=verify,
            num_threads=num_threads,
        )

    def has_training_state(self, root: str | Path) -> bool:
        return has_training_state(self._session, root)
