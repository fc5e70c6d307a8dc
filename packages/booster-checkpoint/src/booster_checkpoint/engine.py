"""`CheckpointEngine`: what `Booster` saves and loads with, at paths and URLs.

This file says what a request means. How a save goes is in ``save``, how a load goes in ``load``, how files look in
``files``; whole training states have an order of their own (`booster_checkpoint.run`). A URL becomes a
path that is read and written without a local copy (`booster_checkpoint.storage`).
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from booster_checkpoint.files.names import MODEL, OPTIMIZER, SAFETENSORS, TORCH, FileNames, file_names
from booster_checkpoint.load.load import ModelLoad, OptimizerLoad, changing
from booster_checkpoint.load.model_files import SourceModelFiles
from booster_checkpoint.run.lease import Leases
from booster_checkpoint.run.load_step import has_step, load_step
from booster_checkpoint.run.save_step import save_step
from booster_checkpoint.save.lora import adapted_model, save_adapters
from booster_checkpoint.save.parts import ModelPart, OptimizerPart
from booster_checkpoint.save.save import BUCKET_BYTES, Saver
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_checkpoint.storage import locate
from booster_core.checkpoint_io import CheckpointIO, resolved
from booster_core.errors import CheckpointAbsentError, CheckpointError, ConfigError
from booster_core.state import parse_json, scheduler_from_json, scheduler_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from booster_checkpoint.save.parts import Part
    from booster_checkpoint.storage import Location
    from booster_core.checkpoint_io import (
        LoadedCheckpoint,
        LoadReport,
        LoadRequest,
        ModelFiles,
        ModelState,
        SaveRequest,
        TrainingState,
    )
    from booster_core.plugin import BoostContext, Plugin
    from booster_core.state import StateAdapter, TensorShard

_TORCH_SUFFIXES = (TORCH, ".pt", ".pth", ".ckpt")
_SUFFIXES = (SAFETENSORS, *_TORCH_SUFFIXES)
"""By these a path is that of a file; not by ``.5-7B``."""
_MIB = 1 << 20
_MIN_BUCKET_BYTES = 1024


class CheckpointEngine(CheckpointIO):
    """Reads and writes the layouts of Hugging Face libraries, of ``torch.save`` and of torch's distributed checkpoints.

    Args:
        plugin: The plugin of the run.
        context: Ranks, precision and timeout of the run.
        bucket_bytes: Most memory that saving or loading takes on a rank besides the state, in bytes. A snapshot for
            ``use_async=True`` takes one copy of what this rank writes, in buffers of this size.

    Raises:
        ConfigError: If ``bucket_bytes`` is below 1 KiB.
    """

    def __init__(self, plugin: Plugin, context: BoostContext, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(plugin, context)
        if bucket_bytes < _MIN_BUCKET_BYTES:
            msg = (
                f"`bucket_bytes={bucket_bytes}` is too small. Use at least {_MIN_BUCKET_BYTES}; the default is 64 MiB."
            )
            raise ConfigError(msg)
        self._session = Session(context.coordinator, timeout_seconds=context.coordinator.timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self._saver = Saver(self._session, bucket_bytes)
        self._leases = Leases()

    def save_model(self, state: ModelState, request: SaveRequest) -> None:
        names = file_names(state.module, request.prefix, use_safetensors=request.use_safetensors)
        self._save(ModelPart(state.adapter, names, dtype=state.dtype, module=state.module), request)

    def load_model(self, state: ModelState, request: LoadRequest) -> LoadReport:
        with self._load(request) as (place, stack):
            load = ModelLoad(self._session, state, place, request, stack, bucket_bytes=self._bucket_bytes)
            with changing("the model"):
                return load.run()

    @classmethod
    def open_model(cls, path: str | Path, model: nn.Module | None = None, *, dequantized: bool = False) -> ModelFiles:
        return SourceModelFiles(locate(resolved(path)), model, dequantized=dequantized)

    @classmethod
    def names_in_files(cls, model: nn.Module) -> Callable[[TensorShard], Iterable[TensorShard]] | None:
        from booster_checkpoint.files.transformers import PretrainedNames

        names = PretrainedNames.of(model)
        return None if names is None else names.shards

    def save_optimizer(self, state: StateAdapter, request: SaveRequest) -> None:
        self._save(OptimizerPart(state, FileNames(base=OPTIMIZER, prefix=request.prefix)), request)

    def load_optimizer(self, state: StateAdapter, request: LoadRequest) -> None:
        with self._load(request) as (place, stack):
            load = OptimizerLoad(self._session, state, place, request, stack, bucket_bytes=self._bucket_bytes)
            with changing("the optimizer"):
                load.run()

    def save_lr_scheduler(self, scheduler: LRScheduler, request: SaveRequest) -> None:
        path = self._place_of(request)
        with self._session.together(request.call, path):
            texts = {path.name: json.dumps(scheduler_to_json(scheduler), indent=1) + "\n"}
        target = target_at(path.parent, check=lambda: _check_is_no_folder(path))
        self._saver.save([], target, request.call, texts=texts)

    def load_lr_scheduler(self, scheduler: LRScheduler, request: LoadRequest) -> None:
        with self._load(request) as (place, _), self._session.together(request.call, place):
            written = place.read_bytes()
            if written is None:
                msg = f"There is no learning rate scheduler's state at '{place}'."
                raise CheckpointAbsentError(msg)
            scheduler_from_json(scheduler, parse_json(written, str(place)), str(place))

    def save_lora(self, state: ModelState, request: SaveRequest, adapters: Sequence[str] | None) -> None:
        model = adapted_model(state.module)
        save_adapters(self._saver, model, state, self._place_of(request), request, selected=adapters)

    def save_checkpoint(self, state: TrainingState, request: SaveRequest) -> None:
        save_step(self._session, self._saver, state, request, leases=self._leases, facts=self.facts())

    def load_checkpoint(self, state: TrainingState, request: LoadRequest) -> LoadedCheckpoint:
        self._saver.begin(request.call)
        return load_step(self._session, state, request, leases=self._leases, bucket_bytes=self._bucket_bytes)

    def has_checkpoint(self, root: str | Path) -> bool:
        return has_step(self._session, root)

    def wait(self) -> None:
        self._saver.begin("wait")

    def when_written(self, call: Callable[[], object]) -> None:
        """Call ``call`` after the save in the background succeeded, or now if there is none.

        Called in the thread that writes, where no process group may be used. An error surfaces as that of the save.
        """
        self._saver.background.follow(call)

    def close(self) -> None:
        """Wait, which gives back the memory that snapshots are kept in.

        Collective: every rank.
        """
        self.wait()

    def _place_of(self, request: SaveRequest) -> Location:
        """Return where to save; what has no storage raises on every rank."""
        if isinstance(request.path, Path):
            return locate(request.path)
        with self._session.together(request.call, request.path):
            return locate(request.path)

    @contextmanager
    def _load(self, request: LoadRequest) -> Iterator[tuple[Location, ExitStack]]:
        """Yield where to load from, and what closes the files after the body; the save before has ended."""
        with self._session.together(request.call, request.path):
            place = locate(request.path)
        request.check()
        self._saver.begin(request.call)
        with ExitStack() as stack:
            yield place, stack

    def _save(self, part: Part, request: SaveRequest) -> None:
        """Write a part to the file, folder or URL that a user named."""
        path = self._place_of(request)
        if request.gather_dtensor:
            folder, check = _place(part, path, request)
            self._saver.save([part], target_at(folder, check=check), request.call, use_async=request.use_async)
            return
        if request.use_async:
            msg = (
                "`use_async=True` has no meaning with `gather_dtensor=False`, which leaves writing to torch. Drop one "
                "of them."
            )
            raise ConfigError(msg)
        kind = OPTIMIZER if isinstance(part, OptimizerPart) else MODEL
        if request.prefix not in (None, kind):
            msg = (
                f"`prefix={request.prefix!r}` has no meaning with `gather_dtensor=False`, unless it is '{kind}', below "
                "which Accelerate looks for values. Leave it out, or write files by `shard=True`."
            )
            raise ConfigError(msg)
        from booster_checkpoint.save.dcp import save_dcp

        self._saver.begin(request.call)
        save_dcp(request.call, self._session, part, path, request.prefix)


def _place(part: Part, path: Location, request: SaveRequest) -> tuple[Location, Callable[[], None]]:
    """Tell a part which files it is written to.

    Returns:
        The files' folder; and a function that raises what is wrong with the path, as it is on this rank's disk.

    Raises:
        ConfigError: If arguments contradict each other.
    """
    names = part.names
    if request.shard:
        if request.size_per_shard <= 0:
            msg = f"`size_per_shard={request.size_per_shard}` is not a size in MiB. The default is 1024."
            raise ConfigError(msg)
        part.max_bytes = request.size_per_shard * _MIB
        return path, lambda: _check_is_no_file(path, "`shard=True` writes a folder. Pass another path or `shard=False`")
    if isinstance(part, ModelPart) and part.is_pretrained and path.suffix not in _SUFFIXES:
        part.is_alone = True
        why = f"this call writes a folder for `from_pretrained`. Pass another path, or '{path}{names.suffix}'"
        return path, lambda: _check_is_no_file(path, why)
    if names.prefix is not None:
        msg = (
            f"`prefix={names.prefix!r}` names the files of a folder; with `shard=False` the path names the file. Drop "
            "one of them."
        )
        raise ConfigError(msg)
    other = _TORCH_SUFFIXES if names.suffix == SAFETENSORS else (SAFETENSORS,)
    if path.suffix in other:
        wanted = "True" if names.suffix == TORCH else "False"
        remedy = f"Use a name that ends in '{names.suffix}'"
        remedy += f", or `use_safetensors={wanted}`." if names.base != OPTIMIZER else "."
        msg = (
            f"The path '{path}' ends in '{path.suffix}', but a {names.suffix.removeprefix('.')} file would be "
            f"written. {remedy}"
        )
        raise ConfigError(msg)
    part.file_name = path.name
    return path.parent, lambda: _check_is_no_folder(path)


def _check_is_no_file(path: Location, why: str) -> None:
    if path.size() is not None:
        msg = f"Checkpoint path '{path}' is a file, but {why}."
        raise CheckpointError(msg)


def _check_is_no_folder(path: Location) -> None:
    if path.is_folder():
        msg = (
            f"Checkpoint path '{path}' is a folder, but this call writes a file. Pass a file's path (or `shard=True`)."
        )
        raise CheckpointError(msg)
