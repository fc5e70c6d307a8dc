"""`PlainCheckpointIO`: what a `Booster` of one process saves and loads with where no other engine is installed.

Files are those of booster-checkpoint, whose engine reads all that is written here; what one process wrote by that
engine is read here. What needs more than one process and one file, such as the steps of a run, raises, and names the
distribution that has it. How files look is in `booster_core.plain_files`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_core.checkpoint_io import (
    CheckpointIO,
    LoadRequest,
    ModelFiles,
    ModelState,
    resolved,
)
from booster_core.errors import CheckpointError, ConfigError, needs_checkpoint
from booster_core.matching import (
    Expectation,
    check_same_parameters,
    check_states,
    compare,
    listed_states,
    states_by_parameter,
)
from booster_core.plain_files import SUFFIX, TensorFiles, decoded, host_copy, write_json, write_tensors
from booster_core.state import (
    OptimizerInfo,
    check_model_is_saved_whole,
    check_optimizer_is_saved_whole,
    copy_part,
    encode_json,
    has_adapters,
    read_json,
    scheduler_from_json,
    scheduler_to_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from typing_extensions import Self

    from booster_core.checkpoint_io import LoadedCheckpoint, LoadReport, SaveRequest, TrainingState
    from booster_core.state import StateAdapter, TensorShard

_MODEL, _OPTIMIZER = "model", "optimizer"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
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
        if is_pretrained and path.suffix not in (SUFFIX, *_TORCH_SUFFIXES):
            why = needs_checkpoint(f"A folder '{path}' as `from_pretrained` reads it is written")
            msg = f"{why} Or pass '{path}{SUFFIX}', to write one file."
            raise ConfigError(msg)
        _write_model(path, state)

    def load_model(self, state: ModelState, request: LoadRequest) -> LoadReport:
        return _load_model(state, TensorFiles.at(self._path(request), _MODEL), request)

    @classmethod
    def open_model(cls, path: str | Path, model: nn.Module | None = None, *, dequantized: bool = False) -> ModelFiles:
        del model  # conversions of names are booster-checkpoint's
        if dequantized:
            raise ConfigError(needs_checkpoint("Quantized weights are read"))
        return _PlainModelFiles(_on_disk(resolved(path)))

    def save_optimizer(self, state: StateAdapter, request: SaveRequest) -> None:
        _write_optimizer(self._file(request), state)

    def load_optimizer(self, state: StateAdapter, request: LoadRequest) -> None:
        _load_optimizer(state, TensorFiles.at(self._path(request), _OPTIMIZER))

    def save_lr_scheduler(self, scheduler: LRScheduler, request: SaveRequest) -> None:
        write_json(self._path(request), scheduler_to_json(scheduler))

    def load_lr_scheduler(self, scheduler: LRScheduler, request: LoadRequest) -> None:
        path = self._path(request)
        scheduler_from_json(scheduler, read_json(path), str(path))

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
        path = self._local(request.path, request.call)
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

    def _local(self, path: str | Path, call: str) -> Path:
        if self.context.coordinator.world_size > 1:
            raise CheckpointError(needs_checkpoint(f"`{call}` of several ranks is done"))
        return _on_disk(path)


class _PlainModelFiles(ModelFiles):
    """Files of safetensors, which the system reads where values are used."""

    def __init__(self, path: Path) -> None:
        files = TensorFiles.at(path, _MODEL)
        super().__init__(path, files.metas(), files.values)
        self._open: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        files = TensorFiles.at(Path(self.path), _MODEL)
        self._check_unchanged(self.tensors, files.metas())
        self._open = files.tensors
        return self

    def __exit__(self, *error: object) -> None:
        self._open = {}

    def read(self, name: str, shard: TensorShard) -> None:
        copy_part(self._open[name], shard)


def _on_disk(path: str | Path) -> Path:
    if not isinstance(path, Path):
        raise CheckpointError(needs_checkpoint(f"URLs, such as '{path}', are written and read"))
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
        tensors[shard.name] = host_copy(_whole(shard), at if shard.dtype.is_floating_point else None)
    inside: dict[str, Tensor] = {}
    values = {name: encode_json(value, name, inside) for name, value in adapter.extra_state().items()}
    write_tensors(path, tensors | {key: host_copy(tensor) for key, tensor in inside.items()}, values)


def _load_model(state: ModelState, files: TensorFiles, request: LoadRequest) -> LoadReport:
    adapter, metas = state.adapter, files.metas()
    extra = tuple(adapter.extra_state())
    report, homes = compare(metas, files.values, Expectation.of(adapter, extra))
    if request.strict and not report.is_complete:
        msg = f"'{files.path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
        raise CheckpointError(msg)
    for shard in adapter.model_targets({name: metas[key] for name, key in homes.items()}):
        if shard.key in homes:
            _whole(shard).copy_(files.tensors[homes[shard.key]])
    stored = {name: {"$tensor": name} for name in extra if name in files.tensors} | files.values
    adapter.load_extra_state({name: decoded(stored[name], files.tensors) for name in extra if name in stored})
    adapter.finish_load(model=True, optimizer=False)
    return report


def _write_optimizer(path: Path, adapter: StateAdapter) -> None:
    check_optimizer_is_saved_whole(adapter)
    tensors = {shard.key: host_copy(_whole(shard)) for shard in adapter.optimizer_shards()}
    write_tensors(path, tensors, {"optimizer": OptimizerInfo.of(adapter).to_json()})


def _load_optimizer(adapter: StateAdapter, files: TensorFiles) -> None:
    groups, metas = files.path / "param_groups.json", files.metas()
    if "optimizer" not in files.values and not groups.is_file():
        msg = f"'{files.path}' holds no optimizer checkpoint: it comes without parameter groups ('{groups.name}')."
        raise CheckpointError(msg)
    saved = OptimizerInfo.from_json(files.values.get("optimizer") or read_json(groups), str(files.path))
    here = OptimizerInfo.of(adapter)
    check_same_parameters(files.path, saved, here)
    adapter.prepare_optimizer_load(states_by_parameter(files.path, metas, here), saved.scalars, saved.groups)
    check_states(files.path, metas, [listed_states(adapter, metas)])
    for shard in adapter.optimizer_shards():
        if shard.key in files.tensors:
            _whole(shard).copy_(files.tensors[shard.key])
    adapter.finish_load(model=False, optimizer=True)
