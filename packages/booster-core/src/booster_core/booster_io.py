"""The saving half of `Booster`: finds the plugin's view of a model's state and hands it to `CheckpointIO`."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.checkpoint.io import CheckpointIO
from booster_core.wrappers import ModelWrapper, OptimizerWrapper, unwrap_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.checkpoint.report import LoadReport
    from booster_core.plugin import BoostContext, Plugin
    from booster_core.state.adapter import StateAdapter


class BoosterIO:
    """Saves and loads what `Booster.boost` returned, and plain models and schedulers beside it."""

    plugin: Plugin

    def __init__(self) -> None:
        # The optimizer of each boosted model: the way from either to the plugin's view of their state.
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, Optimizer | None] = weakref.WeakKeyDictionary()
        self._io: CheckpointIO | None = None

    @property
    def context(self) -> BoostContext:
        """Device, ranks, precision and hooks of this run."""
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The reader and writer of this run's checkpoints."""
        if self._io is None:
            self._io = CheckpointIO(self.context.coordinator, timeout_seconds=self.context.timeout_seconds)
        return self._io

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None = None) -> StateAdapter:
        """Return the view of a model's (and its optimizer's) state as shards.

        Args:
            model: The boosted model, or a plain one that every rank holds whole.
            optimizer: The boosted optimizer; that of the boosted model when left out.

        Collective: none.
        """
        boosted = self._boosted_model(model)
        if boosted is None:
            from booster_core.state.replicated import ReplicatedStateAdapter

            return ReplicatedStateAdapter(model, optimizer, self.context.coordinator)
        return self.plugin.state_adapter(boosted, optimizer or self._optimizers[boosted], self.context)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write a model in the layout of Hugging Face libraries, without gathering it anywhere.

        Args:
            model: The model that `boost` returned, or a plain one that every rank holds whole.
            checkpoint: A file, or with ``shard=True`` a folder. Folders are made as needed; older files are replaced.
            shard: Write a folder of numbered files with their index, and the model's ``config.json`` where it has one.
            gather_dtensor: ``False`` writes a folder of ``torch.distributed.checkpoint`` instead.
            prefix: Put into the file names of a folder, as Hugging Face's ``variant``.
            size_per_shard: Largest size of a numbered file in MiB.
            use_safetensors: Write safetensors; ``False`` writes what ``torch.save`` of a dict writes.
            use_async: Copy the values, return, and write in the background; an error surfaces at the next save, load,
                `wait`, or the interpreter's exit.

        Raises:
            TypeError: If ``model`` is not a module.
            ConfigError: If arguments contradict each other.
            CheckpointError: If the checkpoint can't be written; it is then as it was before.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank of the world.
        """
        self._check_module(model, "save_model")
        boosted = self._boosted_model(model)
        with self._announced("save", "model", checkpoint):
            self.checkpoint_io.save_model(
                self.state_adapter(model),
                checkpoint,
                shard,
                gather_dtensor,
                prefix or None,
                size_per_shard,
                use_safetensors,
                use_async,
                module=model if boosted is None else boosted.unwrap(),
                dtype=None if boosted is None else self.context.precision.save_dtype,
            )

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
    ) -> LoadReport:
        """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

        Args:
            model: The model that `boost` returned, or a plain one that every rank holds whole.
            checkpoint: A file, an index, or a folder.
            strict: Raise unless model and checkpoint hold the same tensors; ``False`` loads those that fit.
            low_cpu_mem_mode: Read just what this rank holds, straight into place; ``False`` reads whole files first.
            num_threads: How many parts of a large tensor are read at once.

        Returns:
            What was loaded and what was not, the same on every rank.

        Raises:
            TypeError: If ``model`` is not a module.
            CheckpointError: If the checkpoint can't be read, is damaged, or with ``strict`` does not fit.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank of the world.
        """
        self._check_module(model, "load_model")
        with self._announced("load", "model", checkpoint):
            return self.checkpoint_io.load_model(
                self.state_adapter(model), checkpoint, strict, low_cpu_mem_mode, num_threads, module=unwrap_model(model)
            )

    load = load_model

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write an optimizer's state in safetensors files, and its parameter groups as JSON.

        Args:
            optimizer: The optimizer that `boost` returned.
            checkpoint: A file, or with ``shard=True`` a folder.
            shard: As in `save_model`, like the arguments that follow.
            gather_dtensor: ``False`` writes a folder of ``torch.distributed.checkpoint``.
            prefix: Put into the file names of a folder.
            size_per_shard: Largest size of a numbered file in MiB.
            use_async: Write in the background.

        Raises:
            TypeError: If ``optimizer`` is not the one that `boost` returned.
            CheckpointError: If the checkpoint can't be written; it is then as it was before.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank of the world.
        """
        adapter = self._adapter_of(optimizer, "save_optimizer")
        with self._announced("save", "optimizer", checkpoint):
            self.checkpoint_io.save_optimizer(
                adapter, checkpoint, shard, gather_dtensor, prefix or None, size_per_shard, use_async
            )

    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state and parameter groups, saved under any plugin and any number of ranks.

        Args:
            optimizer: The optimizer that `boost` returned.
            checkpoint: A file, an index, or a folder.
            low_cpu_mem_mode: As in `load_model`.
            num_threads: As in `load_model`.

        Raises:
            TypeError: If ``optimizer`` is not the one that `boost` returned.
            CheckpointError: If the checkpoint can't be read, is damaged, or is of another model's optimizer.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank of the world.
        """
        adapter = self._adapter_of(optimizer, "load_optimizer")
        with self._announced("load", "optimizer", checkpoint):
            self.checkpoint_io.load_optimizer(adapter, checkpoint, low_cpu_mem_mode, num_threads)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a learning rate scheduler's state as JSON.

        Raises:
            CheckpointError: If the state has no JSON form, or the file can't be written.

        Collective: every rank of the world.
        """
        with self._announced("save", "lr_scheduler", checkpoint):
            self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a learning rate scheduler's state.

        Raises:
            CheckpointError: If the file is not the state of such a scheduler.

        Collective: every rank of the world.
        """
        with self._announced("load", "lr_scheduler", checkpoint):
            self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)

    def wait(self) -> None:
        """Wait until a save that goes on in the background has ended.

        Raises:
            CheckpointError: If it failed, on any rank.

        Collective: every rank of the world.
        """
        self.checkpoint_io.wait()

    def _boosted_model(self, model: nn.Module) -> ModelWrapper | None:
        """Return the boosted model that ``model`` is, or is the inside of; ``None`` for a plain one."""
        for boosted in self._optimizers:
            if isinstance(boosted, ModelWrapper) and (boosted is model or boosted.unwrap() is model):
                return boosted
        return None

    def _adapter_of(self, optimizer: Optimizer, call: str) -> StateAdapter:
        for boosted, own in self._optimizers.items():
            if isinstance(own, OptimizerWrapper) and optimizer in (own, own.unwrap()):
                return self.plugin.state_adapter(boosted, own, self.context)
        msg = f"`Booster.{call}` needs the optimizer returned by `Booster.boost`; got `{type(optimizer).__name__}`."
        raise TypeError(msg)

    def _check_module(self, model: Any, call: str) -> None:
        if not isinstance(model, nn.Module):
            msg = f"`Booster.{call}` needs a torch.nn.Module; got `{type(model).__name__}`."
            raise TypeError(msg)
        if isinstance(model, ModelWrapper) and self._boosted_model(model) is None:
            msg = f"`Booster.{call}` needs a model that this Booster has boosted; this one belongs to another Booster."
            raise TypeError(msg)

    @contextlib.contextmanager
    def _announced(self, verb: str, kind: str, checkpoint: str | Path) -> Iterator[None]:
        """Call the hooks before and after a save or load."""
        hooks, path = self.context.hooks, Path(checkpoint)
        before, after = (getattr(hooks, f"{moment}_{verb}") for moment in ("before", "after"))
        before(kind=kind, checkpoint=path)
        yield
        after(kind=kind, checkpoint=path)
