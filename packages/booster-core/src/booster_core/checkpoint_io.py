"""`CheckpointIO`: the interface between `Booster` and the engine that reads and writes files.

An engine is found by its name in the entry-point group ``booster.checkpoint_io``; booster-checkpoint brings the one
named ``files``. An engine sees a model as a `StateAdapter`: shards that can be read and written, under any
plugin. It holds no strategy logic, and this module no file code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import importlib_metadata

from booster_core.errors import CheckpointError, ConfigError, PluginError, shorten
from booster_core.plugin.hooks import distribution_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.plugin.interface import BoostContext, Plugin
    from booster_core.precision import DynamicLossScaler, PrecisionPolicy
    from booster_core.state.adapter import StateAdapter

__all__ = [
    "CheckpointIO",
    "GlobalPosition",
    "LoadReport",
    "LoadedCheckpoint",
    "MovingAverage",
    "TrainingObjects",
    "TrainingState",
]

CHECKPOINT_GROUP = "booster.checkpoint_io"
DEFAULT_ENGINE = "files"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_model` found; the same on every rank.

    Args:
        loaded: Names of the model's tensors that were read.
        missing: Names of the model's tensors that the checkpoint lacks.
        unexpected: Names of the checkpoint's tensors that the model lacks.
        mismatched: For each tensor that does not fit, why: ``"(3, 4) in the checkpoint, (4, 3) in the model"``.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether checkpoint and model hold the same tensors."""
        return not (self.missing or self.unexpected or self.mismatched)

    def problems(self) -> str:
        """Describe what does not match, with the first ten names of each kind."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} tensors are missing: {shorten(self.missing)}.")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} tensors are unexpected: {shorten(self.unexpected)}.")
        if self.mismatched:
            shown = [f"{name} ({why})" for name, why in self.mismatched.items()]
            parts.append(f"{len(self.mismatched)} tensors do not fit: {shorten(shown)}.")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What `Booster.load_checkpoint` returns; the same on every rank.

    Args:
        step: The step that was saved; 0 where ``resume=True`` found none.
        extra: The values that were passed as ``extra``, tensors on the CPU.
        path: The folder that was loaded; ``""`` where there was none.
        report: What was loaded of the model.
    """

    step: int = 0
    extra: Any = None
    path: str = ""
    report: LoadReport = field(default_factory=LoadReport)


@dataclass(frozen=True, kw_only=True)
class TrainingObjects:
    """The objects whose state is saved with model and optimizer.

    Args:
        device: This rank's device.
        schedulers: Learning rate schedulers.
        loss_scaler: The optimizer's, under fp16.
        dataloader: A loader with ``state_dict``.
        registered: What `Booster.register_for_checkpointing` was given, by name: the object, and ``per_rank``.
    """

    device: torch.device
    schedulers: tuple[LRScheduler, ...] = ()
    loss_scaler: DynamicLossScaler | None = None
    dataloader: Any = None
    registered: Mapping[str, tuple[Any, bool]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that makes up a training state.

    Args:
        model: The model's state.
        optimizer: The optimizer's state, where there is one.
        objects: The other objects of the run.
        module: The user's own model, for small files such as ``config.json``.
        dtype: Element type in which the model's floating tensors are written; their own where ``None``.
        ema: Averages of the model, if any.
        precision: In which the model is boosted; ``None`` for a plain one.
    """

    model: StateAdapter
    optimizer: StateAdapter | None
    objects: TrainingObjects
    module: nn.Module
    dtype: torch.dtype | None = None
    ema: StateAdapter | None = None
    precision: PrecisionPolicy | None = None


class GlobalPosition(ABC):
    """A data loader whose ``state_dict`` is one position in the global order of samples, the same on every rank.

    An engine saves it once, and any number of ranks goes on from it. Of other loaders each rank's own state is saved.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position that any number of ranks saved."""


class MovingAverage(ABC):
    """What `ema` returns: a moving average of a model's weights that an engine can save."""

    @abstractmethod
    def update(self, decay: float | None = None) -> None:
        """Move the average towards the model's present weights.

        Collective: none.
        """

    @abstractmethod
    def state_adapter(self) -> StateAdapter:
        """Return the averages as the state of a model.

        Collective: none.
        """


class CheckpointIO(ABC):
    """Reads and writes checkpoints of state that is distributed in any way.

    `Booster` makes one for a run, when it first needs one. Arguments, errors and who must call are documented at
    `Booster`'s methods of the same names; every method here is collective over all ranks, unless it says otherwise.

    Args:
        plugin: The plugin of the run, for the facts that a manifest states.
        context: Ranks, precision and timeout of the run.
    """

    def __init__(self, plugin: Plugin, context: BoostContext) -> None:
        self.plugin = plugin
        self.context = context

    @abstractmethod
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
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Write a model; ``module`` is the user's own, ``dtype`` what floating tensors are written in, all or by name.

        Where ``dtype`` is by name, values are those of `StateAdapter.export_shards`.
        """

    @abstractmethod
    def load_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - as for `Booster.load_model`
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        exclude: Sequence[str] = (),
        module: nn.Module | None = None,
    ) -> LoadReport:
        """Read a model in any form that the engine knows."""

    @abstractmethod
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
        """Write an optimizer's state and parameter groups."""

    @abstractmethod
    def load_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - as for `Booster.load_optimizer`
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state and parameter groups."""

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a scheduler's state."""

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a scheduler's state."""

    @abstractmethod
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
        """Write a model's low-rank adapters as peft does; see `Booster.save_lora_as_pretrained`.

        ``dtype`` is as for `save_model`, by the names of the model's tensors.
        """

    @abstractmethod
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
        """Write a step; ``make_state`` returns what to write, and may raise what the user got wrong on one rank."""

    @abstractmethod
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
        """Read a step into what ``make_state`` returns."""

    @abstractmethod
    def has_training_state(self, root: str | Path) -> bool:
        """Return whether there is a step to load, the same on every rank."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until a save in the background has ended, and raise its error on every rank."""

    @abstractmethod
    def location(self, checkpoint: str | Path) -> str | Path:
        """Return a URL as it is, and any other path as hooks are told it. Not collective."""

    @abstractmethod
    def when_written(self, call: Callable[[], object]) -> None:
        """Call ``call`` after the pending save succeeded, or now if none is pending. Not collective."""


def checkpoint_io_class(name: str = DEFAULT_ENGINE) -> type[CheckpointIO]:
    """Import the checkpoint engine of a name.

    Raises:
        CheckpointError: If no engine is installed at all.
        ConfigError: If none has this name, or several have.
        PluginError: If it can't be imported, or is no `CheckpointIO`.

    Collective: none.
    """
    entries = list(importlib_metadata.entry_points(group=CHECKPOINT_GROUP))
    named = [entry for entry in entries if entry.name == name]
    if not named and name == DEFAULT_ENGINE:
        msg = (
            "Saving and loading need an engine, and none is installed. Run `pip install booster-checkpoint`; every "
            "strategy, such as booster-ddp, brings it along."
        )
        raise CheckpointError(msg)
    if len(named) != 1:
        have = ", ".join(sorted({f"'{entry.name}'" for entry in entries})) or "none"
        whose = f", from {' and '.join(map(distribution_of, named))}" if named else ""
        msg = f"There are {len(named)} checkpoint engines named '{name}'{whose}. Installed: {have}."
        raise ConfigError(msg)
    whose = f"The checkpoint engine '{name}' ({distribution_of(named[0])})"
    try:
        found = named[0].load()
    except (Exception, SystemExit) as error:
        msg = f"{whose} could not be imported: {type(error).__name__}: {error}"
        raise PluginError(msg) from error
    if not (isinstance(found, type) and issubclass(found, CheckpointIO)):
        msg = f"{whose} is {found!r}, which is no subclass of `booster_core.CheckpointIO`."
        raise PluginError(msg)
    return found
