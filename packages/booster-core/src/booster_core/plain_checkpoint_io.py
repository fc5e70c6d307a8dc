"""`PlainCheckpointIO`: what a `Booster` of one process saves and loads with where no other engine is installed.

Files are those of booster-checkpoint, whose engine reads all that is written here; a file that one process wrote by
that engine is read here. What needs more than one process and one file, such as the steps of a run, raises, and names
the distribution that has it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from booster_core.checkpoint_io import CheckpointIO, LoadRequest, ModelState
from booster_core.errors import CheckpointError, ConfigError, needs_checkpoint, shorten
from booster_core.matching import (
    Expectation,
    check_same_parameters,
    check_states,
    compare,
    listed_states,
    states_by_parameter,
)
from booster_core.state import (
    OptimizerInfo,
    TensorMeta,
    check_model_is_saved_whole,
    check_optimizer_is_saved_whole,
    decode_json,
    encode_json,
    has_adapters,
    parse_json,
    scheduler_from_json,
    scheduler_to_json,
    tensor_references,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.checkpoint_io import LoadedCheckpoint, LoadReport, SaveRequest, TrainingState
    from booster_core.state import StateAdapter, TensorShard

_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_VALUES = "booster."
"""Begins the entries of a file's metadata that hold values of ours."""
_ONLY = {
    "shard": False,
    "gather_dtensor": True,
    "prefix": None,
    "use_safetensors": True,
    "use_async": False,
    "rename": None,
    "exclude": (),
}
"""Arguments that have one meaning here: what they are by default."""


class PlainCheckpointIO(CheckpointIO):
    """Reads and writes whole models, optimizers and schedulers of one process on a local disk.

    Memory: one copy of what is written, on the host.
    """

    def save_model(self, state: ModelState, request: SaveRequest) -> None:
        path = self._file(request)
        module: Any = state.module
        is_pretrained = callable(getattr(module, "save_pretrained", None)) and not has_adapters(module)
        if is_pretrained and path.suffix not in (_SUFFIX, *_TORCH_SUFFIXES):
            why = needs_checkpoint(f"A folder '{path}' as `from_pretrained` reads it is written")
            msg = f"{why} Or pass '{path}{_SUFFIX}', to write one file."
            raise ConfigError(msg)
        _write_model(path, state)

    def load_model(self, state: ModelState, request: LoadRequest) -> LoadReport:
        return _load_model(state, _File.at(self._path(request), "model"), request)

    def save_optimizer(self, state: StateAdapter, request: SaveRequest) -> None:
        _write_optimizer(self._file(request), state)

    def load_optimizer(self, state: StateAdapter, request: LoadRequest) -> None:
        _load_optimizer(state, _File.at(self._path(request), "optimizer"))

    def save_lr_scheduler(self, scheduler: LRScheduler, request: SaveRequest) -> None:
        with _replacing(self._path(request)) as temporary:
            temporary.write_text(json.dumps(scheduler_to_json(scheduler), indent=1) + "\n", encoding="utf-8")

    def load_lr_scheduler(self, scheduler: LRScheduler, request: LoadRequest) -> None:
        path = self._path(request)
        with _file_errors(path, "read"):
            content = parse_json(path.read_bytes(), str(path))
        scheduler_from_json(scheduler, content, str(path))

    def save_lora(self, state: ModelState, request: SaveRequest, adapters: Sequence[str] | None) -> None:
        del state, request, adapters
        raise ConfigError(needs_checkpoint("Adapters are saved"))

    def save_checkpoint(self, state: TrainingState, request: SaveRequest) -> None:
        del state, request
        raise ConfigError(needs_checkpoint("The steps of a run are saved"))

    def load_checkpoint(self, state: TrainingState, request: LoadRequest) -> LoadedCheckpoint:
        del state, request
        raise ConfigError(needs_checkpoint("The steps of a run are loaded"))

    def has_checkpoint(self, root: str | Path) -> bool:
        raise ConfigError(needs_checkpoint(f"'{root}', a folder of steps, is looked into"))

    def wait(self) -> None:
        """Do nothing: what was saved is written."""

    def when_written(self, call: Callable[[], object]) -> None:
        call()

    def _path(self, request: SaveRequest | LoadRequest) -> Path:
        """Return a request's path, if the request asks for nothing that only booster-checkpoint does."""
        path = request.path
        if self.context.coordinator.world_size > 1:
            raise CheckpointError(needs_checkpoint(f"`{request.call}` of several ranks is done"))
        if not isinstance(path, Path):
            raise CheckpointError(needs_checkpoint(f"URLs, such as '{path}', are written and read"))
        for option, only in _ONLY.items():
            asked = getattr(request, option, only)
            if asked != only and (asked or only):
                raise ConfigError(needs_checkpoint(f"`{option}={asked!r}` of `{request.call}` is followed"))
        return path

    def _file(self, request: SaveRequest) -> Path:
        path = self._path(request)
        if path.suffix in _TORCH_SUFFIXES:
            raise ConfigError(needs_checkpoint(f"Files that end in '{path.suffix}', such as '{path}', are written"))
        if path.is_dir():
            msg = f"Checkpoint path '{path}' is a folder, but this call writes a file there. Pass another path."
            raise CheckpointError(msg)
        return path


def _whole(shard: TensorShard) -> Tensor:
    """Return the values of a shard in the shape of its tensor."""
    if shard.numel != math.prod(shard.global_shape):
        raise CheckpointError(needs_checkpoint(f"'{shard.key}' is in parts; parts of tensors are saved and loaded"))
    return shard.data.detach().view(shard.global_shape)


def _write_model(path: Path, state: ModelState) -> None:
    if state.module is not None:
        check_model_is_saved_whole(state.module)
    adapter, dtype = state.adapter, state.dtype
    tensors: dict[str, Tensor] = {}
    for shard in adapter.export_shards(dtype) if isinstance(dtype, Mapping) else adapter.model_shards():
        at = dtype.get(shard.name) if isinstance(dtype, Mapping) else dtype
        tensors[shard.name] = _host_copy(_whole(shard), at if shard.dtype.is_floating_point else None)
    inside: dict[str, Tensor] = {}
    values = {name: encode_json(value, name, inside) for name, value in adapter.extra_state().items()}
    _write(path, tensors | {key: _host_copy(tensor) for key, tensor in inside.items()}, values)


def _load_model(state: ModelState, file: _File, request: LoadRequest) -> LoadReport:
    adapter, metas = state.adapter, file.metas()
    extra = tuple(adapter.extra_state())
    report, homes = compare(metas, file.values, Expectation.of(adapter, extra))
    if request.strict and not report.is_complete:
        msg = f"'{file.path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
        raise CheckpointError(msg)
    for shard in adapter.model_targets({name: metas[key] for name, key in homes.items()}):
        if shard.key in homes:
            _whole(shard).copy_(file.tensors[homes[shard.key]])
    stored = {name: {"$tensor": name} for name in extra if name in file.tensors} | file.values
    adapter.load_extra_state({name: _decoded(stored[name], file.tensors) for name in extra if name in stored})
    adapter.finish_load(model=True, optimizer=False)
    return report


def _write_optimizer(path: Path, adapter: StateAdapter) -> None:
    check_optimizer_is_saved_whole(adapter)
    tensors = {shard.key: _host_copy(_whole(shard)) for shard in adapter.optimizer_shards()}
    _write(path, tensors, {"optimizer": OptimizerInfo.of(adapter).to_json()})


def _load_optimizer(adapter: StateAdapter, file: _File) -> None:
    metas = file.metas()
    if "optimizer" not in file.values:
        msg = f"'{file.path}' holds no optimizer that `save_optimizer` wrote: it has no groups."
        raise CheckpointError(msg)
    saved = OptimizerInfo.from_json(file.values["optimizer"], str(file.path))
    here = OptimizerInfo.of(adapter)
    check_same_parameters(file.path, saved, here)
    adapter.prepare_optimizer_load(states_by_parameter(file.path, metas, saved), saved.scalars, saved.groups)
    check_states(file.path, metas, [listed_states(adapter, metas)])
    for shard in adapter.optimizer_shards():
        if shard.key in file.tensors:
            _whole(shard).copy_(file.tensors[shard.key])
    adapter.finish_load(model=False, optimizer=True)


class _File(NamedTuple):
    """What a file of a checkpoint holds.

    Args:
        path: The file, or its folder.
        tensors: By name, on the host.
        values: What is no tensor, as encoded JSON.
    """

    path: Path
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @classmethod
    def at(cls, path: Path, stem: str) -> _File:
        """Read a file, or the one of a folder that this engine or booster-checkpoint wrote.

        Raises:
            CheckpointError: If there is no such file, or it is damaged.
        """
        home = path
        if not path.is_file():
            with _file_errors(path, "read"):
                names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
            home = path / f"{stem}{_SUFFIX}"
            if f".{home.name}.index.json.interrupted" in names:
                msg = f"A save into '{path}' was interrupted, so its files may be of two saves. Save again."
                raise CheckpointError(msg)
            if home.name not in names:
                found = f"there is {shorten(names)}" if names else "there is nothing"
                msg = f"'{path}' is no folder of one '{home.name}': {found}. {needs_checkpoint('Other forms are read')}"
                raise CheckpointError(msg)
        try:
            with safe_open(home, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
                metadata = file.metadata() or {}
            values = {
                key.removeprefix(_VALUES): json.loads(text) for key, text in metadata.items() if key.startswith(_VALUES)
            }
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            msg = f"'{home}' cannot be read as safetensors: {error}. {needs_checkpoint('Other forms are read')}"
            raise CheckpointError(msg) from error
        return cls(path, tensors, values)

    def metas(self) -> dict[str, TensorMeta]:
        """Return shape and element type of each tensor."""
        return {key: TensorMeta(shape=tuple(values.shape), dtype=values.dtype) for key, values in self.tensors.items()}


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a value, with tensors of its own."""
    return decode_json(value, {key: tensors[key].clone() for key in tensor_references(value) if key in tensors})


def _host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of values on the host, whose memory is its own; in another element type, if one is given."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


@contextlib.contextmanager
def _file_errors(path: Path, verb: str) -> Iterator[None]:
    """Raise what fails in the body as a `CheckpointError` that names a path, and says that it can't be ``verb``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        msg = f"'{path}' cannot be {verb}: {reason}."
        raise CheckpointError(msg) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file, which takes the place of ``path``, durably, if the body succeeds."""
    temporary = path.with_name(f".{path.name}.tmp")  # the next save replaces what a killed one left
    try:
        with _file_errors(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> None:
    """Replace a file by one of tensors on the host and of encoded JSON; it is as it was if that fails."""
    metadata = {"format": "pt", **{_VALUES + name: json.dumps(value) for name, value in values.items()}}
    with _replacing(path) as temporary:
        save_file(tensors, temporary, metadata)
