"""`CheckpointIO`: the interface between `Booster` and the engine that reads and writes files.

An engine is found by its name in the entry-point group ``booster.checkpoint_io``; booster-checkpoint brings the one
named ``files``, for which `booster_core.plain_checkpoint_io` stands in. An engine sees a model as a `StateAdapter`:
shards that can be read and written, under any plugin. It holds no strategy logic, and this module no file code.
"""

from __future__ import annotations

import math
import platform
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

import importlib_metadata
import torch

from booster_core.errors import CheckpointError, ConfigError, PluginError, shorten
from booster_core.plugin.hooks import distribution_of, entry_points_by_name
from booster_core.state import TensorShard, decode_extra_state, encode_json, full_box

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from typing_extensions import Self

    from booster_core.plugin.interface import BoostContext, Plugin
    from booster_core.precision import DynamicLossScaler, PrecisionPolicy
    from booster_core.state.adapter import StateAdapter, TensorMeta

__all__ = [
    "LATEST",
    "LOADER",
    "NEWEST_WHOLE",
    "CheckpointIO",
    "GlobalPosition",
    "LoadReport",
    "LoadRequest",
    "LoadedCheckpoint",
    "ModelFiles",
    "ModelState",
    "MovingAverage",
    "SaveRequest",
    "StepOptions",
    "TrainingObjects",
    "TrainingState",
    "checkpoint_io_class",
    "keeps_position",
    "local_path",
    "mebibytes",
    "new_step_name",
    "parse_step_name",
    "resolved",
    "scheme_of",
    "step_name",
]

CHECKPOINT_GROUP = "booster.checkpoint_io"
DEFAULT_ENGINE = "files"
LOADER = "dataloader/"
"""The name of a data loader that is not ours; users' names contain no slash."""
_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
LATEST = "latest"
NEWEST_WHOLE = "newest-whole"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MIB = 2**20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(path: str | Path) -> str | None:
    """Return the scheme of a URL in lower case; ``None`` for a path, and for ``file://``, which is one."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    scheme = match[1].lower() if match else None
    return None if scheme == "file" else scheme


def local_path(path: str | Path) -> str | Path:
    """Return a path with ``file://`` taken off; URLs of other schemes as they are.

    Raises:
        CheckpointError: If a ``file://`` URL names another host, or another URL has a part ``..``. Most storages take
            that for a name, and the local copy would be written outside of its folder.
    """
    if isinstance(path, str) and path.lower().startswith("file://"):
        parts = urlsplit(path)
        if parts.netloc not in ("", "localhost"):
            msg = f"'{path}' names the host '{parts.netloc}'. Write `file:///path` for a path on this one."
            raise CheckpointError(msg)
        return unquote(parts.path)
    if scheme_of(path) is not None and ".." in str(path).split("/"):
        msg = f"The URL '{path}' has a part '..', which storages do not follow. Write the URL without it."
        raise CheckpointError(msg)
    return path


def resolved(path: str | Path) -> str | Path:
    """Return a URL as it is, and any other path absolute, ``file://`` taken off and ``~`` expanded.

    Raises:
        CheckpointError: As `local_path`.
    """
    path = local_path(path)
    if scheme_of(path) is not None:
        return path
    is_of_home = Path(path).parts[:1] == ("~",)
    return (Path(path).expanduser() if is_of_home else Path(path)).absolute()


def mebibytes(size: int | str) -> int:
    """Return a size such as ``"5GB"`` in whole MiB, not above it.

    Raises:
        ConfigError: If it is no size, or below 1 MiB.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size), re.IGNORECASE)
    unit = found[2].upper() if found else None
    if found is None or unit not in _UNITS:
        msg = f"`max_shard_size={size!r}` is not a size. Use bytes, or a string such as '5GB' or '500MB'."
        raise ConfigError(msg)
    number = int(float(found[1]) * _UNITS[unit]) // _MIB
    if number < 1:
        msg = f"`max_shard_size={size!r}` is below 1 MiB, the smallest size of a file here. Use a larger one."
        raise ConfigError(msg)
    return number


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a saved step is, and which steps stay; see `Booster.save_checkpoint`.

    Args:
        step: Number of steps taken so far.
        extra: The user's own JSON values and tensors.
        metric: How good the step is; smaller is better.
        keep_last: Keep this many steps.
        keep_every: Keep multiples of this.
        keep_best: Keep this many steps with the smallest metric.
    """

    step: int
    extra: Any = None
    metric: float | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None

    def check(self) -> None:
        """Raise `ConfigError` if a number is out of range."""
        check_step(self.step)
        for name, value in self._rules().items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                msg = f"`{name}={value!r}` is not a number of steps. Use 1 or more, or None."
                raise ConfigError(msg)
        if self.metric is not None:
            try:
                float(self.metric)
            except (TypeError, ValueError, RuntimeError) as error:
                msg = f"`metric={self.metric!r}` is not a number, nor a tensor with one element."
                raise ConfigError(msg) from error

    def agreed(self) -> dict[str, Any]:
        """Return what ranks must have alike, by name; values that are equal as JSON are equal."""
        metric = None if self.metric is None else encode_json(float(self.metric), "metric")
        return {"step": self.step, **self._rules(), "metric": metric}

    @property
    def has_retention(self) -> bool:
        """Whether any rule says which steps stay; without one, all do."""
        return any(value is not None for value in self._rules().values())

    def kept(self, steps: Collection[int], metrics: Mapping[int, float]) -> set[int]:
        """Return the steps that stay: those that any rule keeps, and all of them without a rule.

        Args:
            steps: The steps, up to the one that was saved, which always stays.
            metrics: The metric of each step that has one; not a number is worse than any.
        """
        if not steps or not self.has_retention:
            return set(steps)
        kept = {max(steps)}
        if self.keep_last is not None:
            kept.update(sorted(steps)[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best is not None:
            rated = [step for step in steps if step in metrics]
            rated.sort(key=lambda step: (math.isnan(metrics[step]), metrics[step], -step))
            kept.update(rated[: self.keep_best])
        return kept

    def _rules(self) -> dict[str, int | None]:
        return {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": self.keep_best}


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One call that saves, with the arguments that `Booster.save_model` and `Booster.save_checkpoint` document.

    Args:
        call: What the user called; appears in messages.
        path: A file or folder. It becomes absolute at once, so a script may change its folder while a save goes on in
            the background; a URL stays as it is.
        shard: Write a folder of numbered files with their index.
        gather_dtensor: ``False`` writes a folder of ``torch.distributed.checkpoint`` instead.
        prefix: Put into the file names of a folder.
        size_per_shard: Largest size of a numbered file in MiB.
        use_safetensors: Write safetensors; ``False`` writes what ``torch.save`` of a dict writes.
        use_async: Copy the values, return, and write in the background.
        save_embedding_layers: Write embeddings with adapters, or ``"auto"``.
        save_frozen: Write frozen parameters, too, in ``save_checkpoint``.
        step: The step, for ``save_checkpoint``.

    Raises:
        CheckpointError: If the path is a URL that can't be followed.
    """

    call: str
    path: str | Path
    shard: bool = False
    gather_dtensor: bool = True
    prefix: str | None = None
    size_per_shard: int = 1024
    use_safetensors: bool = True
    use_async: bool = False
    save_embedding_layers: bool | str = "auto"
    save_frozen: bool = True
    step: StepOptions | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", resolved(self.path))

    @classmethod
    def of_files(cls, *, format: str | None, max_shard_size: int | str | None, **options: Any) -> SaveRequest:  # noqa: A002 - as in `Booster.save_model`
        """Return the request of a save of one model or optimizer, two of whose options have two names.

        Raises:
            ConfigError: If a value is wrong.
        """
        if format not in (None, "dcp"):
            msg = (
                f"`format={format!r}` is none. Use 'dcp', the format of torch.distributed.checkpoint, or leave it out."
            )
            raise ConfigError(msg)
        if format == "dcp":
            options["gather_dtensor"] = False
        if max_shard_size is not None:
            options["size_per_shard"] = mebibytes(max_shard_size)
        return cls(**options)

    def agreed(self) -> dict[str, Any]:
        """Return what ranks must have alike, by name; values that are equal as JSON are equal."""
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("path", "step")}
        return {**plain, "path": str(self.path), **({} if self.step is None else self.step.agreed())}


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """One call that loads, with the arguments that `Booster.load_model` and `Booster.load_checkpoint` document.

    Args:
        call: What the user called; appears in messages.
        path: A file or folder; it becomes absolute at once. A URL stays as it is.
        strict: Raise unless all that is loaded fits.
        num_threads: How many parts of a large tensor are read at once.
        verify: Compare checksums of a step.
        rename: Changes the checkpoint's names.
        exclude: Patterns of the model's names that are left as they are.
        step: Which step ``load_checkpoint`` loads.
        resume: The run goes on saving there, and begins at step 0 where there is no checkpoint.

    Raises:
        CheckpointError: If the path is a URL that can't be followed.
    """

    call: str
    path: str | Path
    strict: bool = True
    num_threads: int = 1
    verify: bool = True
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    exclude: Sequence[str] = ()
    step: int | str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", resolved(self.path))

    @property
    def wanted_step(self) -> int | str:
        """The step that is asked for: a number, `LATEST` or `NEWEST_WHOLE`."""
        if self.step is not None:
            return self.step
        return NEWEST_WHOLE if self.resume else LATEST

    def check(self) -> None:
        """Raise `ConfigError` if a number is out of range."""
        if self.num_threads < 1:
            msg = f"`num_threads={self.num_threads}` is not a number of threads. Use 1 or more."
            raise ConfigError(msg)
        if self.step not in (None, LATEST, NEWEST_WHOLE):
            check_step(self.step, others=f", or '{LATEST}' or '{NEWEST_WHOLE}'")


def check_step(step: Any, *, others: str = "") -> None:
    """Raise `ConfigError` unless a value is a number of steps.

    Args:
        step: The value.
        others: What else could be passed, for the message.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        msg = f"`step={step!r}` is not a step. Use the number of steps taken so far{others}."
        raise ConfigError(msg)


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
        data_index: This rank's index among those that see different samples, which draw different random numbers.
    """

    device: torch.device
    schedulers: tuple[LRScheduler, ...] = ()
    loss_scaler: DynamicLossScaler | None = None
    dataloader: Any = None
    registered: Mapping[str, tuple[Any, bool]] = field(default_factory=dict)
    data_index: int = 0

    def stateful(self) -> dict[str, tuple[Any, bool]]:
        """Return registered objects, and a data loader that counts its position in a way of its own on each rank."""
        is_own = self.dataloader is not None and not isinstance(self.dataloader, GlobalPosition)
        return {**self.registered, **({LOADER: (self.dataloader, True)} if is_own else {})}

    def check_dataloader(self, method: str) -> None:
        """Raise `CheckpointError` if there is a data loader that lacks a method, such as ``state_dict``."""
        if self.dataloader is not None and not callable(getattr(self.dataloader, method, None)):
            kind = type(self.dataloader).__name__
            msg = (
                f"`dataloader` is a `{kind}`, which cannot tell its position. Pass the loader that `Booster.boost` or "
                "`Booster.prepare_dataloader` returned, or keep the position yourself in `extra`."
            )
            raise CheckpointError(msg)


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A model to save or load.

    Args:
        adapter: Its shards.
        module: The user's own model, for its configuration and for names in published files.
        dtype: Element type in which floating tensors are written, for all or by their names; those without one are
            written as they are. Where it is by name, values are those of `StateAdapter.export_shards`.
    """

    adapter: StateAdapter
    module: nn.Module | None = None
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that makes up a training state.

    Args:
        model: The model.
        objects: The other objects of the run.
        optimizer: The optimizer's state, where there is one.
        ema: Averages of the model, if any.
        precision: In which the model is boosted; ``None`` for a plain one.
    """

    model: ModelState
    objects: TrainingObjects
    optimizer: StateAdapter | None = None
    ema: ModelState | None = None
    precision: PrecisionPolicy | None = None


def step_name(step: int, revision: int = 0) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}" + (f".{revision}" if revision else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return step and revision of a folder's name; ``None`` for other names."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def new_step_name(step: int, taken: Iterable[str]) -> str:
    """Return a name for a step's folder; a step that is among the names taken gets another revision."""
    found = [parsed for parsed in map(parse_step_name, taken) if parsed is not None]
    revisions = [revision for other, revision in found if other == step]
    return step_name(step, max(revisions) + 1 if revisions else 0)


class GlobalPosition(ABC):
    """A data loader whose ``state_dict`` is one position in the global order of samples, the same on every rank.

    An engine saves it once, and any number of ranks goes on from it. Of other loaders each rank's own state is saved.

    Attributes:
        device: Where batches are handed out; ``None`` leaves them where they are.
    """

    device: torch.device | None = None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position that any number of ranks saved."""


def keeps_position(loader: object) -> bool:
    """Return whether a data loader has a ``state_dict``, be it a `GlobalPosition` or this rank's own position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class MovingAverage(Protocol):
    """What `Booster.save_checkpoint` takes as ``ema``: anything that shows averages as the state of a model."""

    def state_adapter(self) -> StateAdapter:
        """Return the averages as the state of a model, to be saved or loaded."""


class ModelFiles(ABC):
    """The tensors of a checkpoint, of which names and shapes are known and values are read in parts.

    A context manager that may be entered any number of times: the files are open in its body, and only there.

    Args:
        path: The file or folder.
        tensors: Shape and element type of each tensor, by name.
        values: What is no tensor, as encoded JSON, by name.
    """

    def __init__(self, path: str | Path, tensors: Mapping[str, TensorMeta], values: Mapping[str, Any]) -> None:
        self.path, self.tensors, self.values = path, tensors, values

    @abstractmethod
    def __enter__(self) -> Self:
        """Open the files.

        Raises:
            CheckpointError: If they can't be read any more, or a tensor is not what it was at first.
        """

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""

    @abstractmethod
    def read(self, name: str, shard: TensorShard) -> None:
        """Read a shard's part of a tensor, converted to the shard's element type, and nothing else.

        Args:
            name: Name of the tensor.
            shard: Where the values go; its ``global_shape`` is the tensor's shape.
        """

    def read_whole(self, name: str) -> Tensor:
        """Return all of a tensor, on the host."""
        meta = self.tensors[name]
        values = torch.empty(meta.shape, dtype=meta.dtype)
        box = full_box(meta.shape)
        self.read(name, TensorShard(name=name, global_shape=meta.shape, dtype=meta.dtype, box=box, data=values))
        return values

    def extra_values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the extra state of modules, decoded, for those of the names that have some."""
        return decode_extra_state(names, self.values, self.tensors, self.read_whole)

    def _check_unchanged(self, before: Mapping[str, TensorMeta], found: Mapping[str, TensorMeta]) -> None:
        """Raise `CheckpointError` unless the files still have all tensors that they had before."""
        for name, meta in before.items():
            if found.get(name) != meta:
                now = f"{found[name].shape} of {found[name].dtype}" if name in found else "missing"
                msg = f"'{self.path}' was changed: '{name}' was {meta.shape} of {meta.dtype}, and is {now}."
                raise CheckpointError(msg)


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

    def facts(self) -> dict[str, Any]:
        """Return what a manifest states of this run, as JSON values. Nothing of it is needed to load."""
        world_size = self.context.coordinator.world_size
        plugin = type(self.plugin)
        return {
            "written_by": {
                "booster-core": _version("booster_core"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "plugin": {
                "name": self.plugin.name,
                "class": f"{plugin.__module__}.{plugin.__qualname__}",
                "version": _version(plugin.__module__.partition(".")[0]),
                "options": {name: repr(value) for name, value in self.plugin.describe().items()},
            },
            "world_size": world_size,
            "mesh": {
                "world": world_size,
                "data_parallel": self.plugin.data_parallel_coordinates(self.context.coordinator)[1],
            },
            "precision": self.context.precision.describe(),
        }

    @abstractmethod
    def save_model(self, state: ModelState, request: SaveRequest) -> None:
        """Write a model."""

    @abstractmethod
    def load_model(self, state: ModelState, request: LoadRequest) -> LoadReport:
        """Read a model in any form that the engine knows."""

    @classmethod
    def open_model(cls, path: str | Path, model: nn.Module | None = None, *, dequantized: bool = False) -> ModelFiles:
        """Look at a model's files, in any form that the engine knows, and read no values. Not collective.

        Args:
            path: A file or folder.
            model: Name the tensors as this model does, where its files have other names; it may be lazy. Weights that
                are quantized in the files are as the model holds them.
            dequantized: Without a model, quantized weights are the values that they stand for.

        Raises:
            CheckpointError: If the files can't be read.
            ConfigError: If the engine can't do this.
        """
        del path, model, dequantized
        msg = f"The checkpoint engine `{cls.__name__}` can't read models in parts; it has no `open_model`."
        raise ConfigError(msg)

    @classmethod
    def names_in_files(cls, model: nn.Module) -> Callable[[TensorShard], Iterable[TensorShard]] | None:
        """Return what gives shards of a model's tensors the names and shapes that `save_model` writes. Not collective.

        Args:
            model: The user's model, without adapters.

        Returns:
            A function from a shard to its parts in files, whose data are the shard's; ``None`` where files have the
            model's own names and shapes.
        """
        del model
        return None

    @abstractmethod
    def save_optimizer(self, state: StateAdapter, request: SaveRequest) -> None:
        """Write an optimizer's state and parameter groups."""

    @abstractmethod
    def load_optimizer(self, state: StateAdapter, request: LoadRequest) -> None:
        """Read an optimizer's state and parameter groups."""

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, request: SaveRequest) -> None:
        """Write a scheduler's state."""

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, request: LoadRequest) -> None:
        """Read a scheduler's state."""

    @abstractmethod
    def save_lora(self, state: ModelState, request: SaveRequest, adapters: Sequence[str] | None) -> None:
        """Write a model's low-rank adapters, those of these names or all, as `Booster.save_lora_as_pretrained` says."""

    @abstractmethod
    def save_checkpoint(self, state: TrainingState, request: SaveRequest) -> None:
        """Write a step; ``request.step`` says which."""

    @abstractmethod
    def load_checkpoint(self, state: TrainingState, request: LoadRequest) -> LoadedCheckpoint:
        """Read a step into a training state."""

    @abstractmethod
    def has_checkpoint(self, root: str | Path) -> bool:
        """Return whether there is a step to load, the same on every rank.

        Args:
            root: An absolute path, or a URL.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until a save in the background has ended, and raise its error on every rank."""

    @abstractmethod
    def when_written(self, call: Callable[[], object]) -> None:
        """Call ``call`` after the pending save succeeded, or now if none is pending. Not collective."""


def _version(package: str) -> str | None:
    try:
        return importlib_metadata.version(package)
    except importlib_metadata.PackageNotFoundError:
        return None


def checkpoint_io_class(name: str = DEFAULT_ENGINE) -> type[CheckpointIO]:
    """Import the checkpoint engine of a name; where none has the default one, that of core for one process.

    Args:
        name: As the engine's distribution registers it.

    Raises:
        ConfigError: If none has this name, or several have.
        PluginError: If it can't be imported, or is no `CheckpointIO`.
    """
    by_name = entry_points_by_name(CHECKPOINT_GROUP)
    named = by_name.get(name, [])
    if not named and name == DEFAULT_ENGINE:
        from booster_core.plain_checkpoint_io import PlainCheckpointIO

        return PlainCheckpointIO
    if len(named) != 1:
        have = ", ".join(sorted(map(repr, by_name))) or "none"
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
