"""`CheckpointFiles`: saves and loads models, optimizers and schedulers under any plugin, through its `StateAdapter`.

This file says what a call's arguments mean. How a save goes is in ``save``, how a load goes in ``load``, how files look
in ``files``. A URL becomes a path that is read and written without a local copy (`booster_checkpoint.storage`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from booster_checkpoint.files.index import read_json
from booster_checkpoint.files.layout import MODEL, OPTIMIZER, SAFETENSORS, TORCH, TORCH_MODEL, FileNames
from booster_checkpoint.load.loading import load_model, load_optimizer
from booster_checkpoint.run.scheduler import scheduler_from_json, scheduler_to_json
from booster_checkpoint.save.parts import ModelPart, OptimizerPart, Part
from booster_checkpoint.save.saver import Saver
from booster_checkpoint.session import Session
from booster_checkpoint.storage import RemotePath, local_path, path_at, scheme_of
from booster_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_core.checkpoint_io import LoadReport
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter

_MIB = 1 << 20
_MIN_BUCKET_BYTES = 1024
_TORCH_SUFFIXES = (TORCH, ".pt", ".pth", ".ckpt")
_SUFFIXES = (SAFETENSORS, *_TORCH_SUFFIXES)
"""By these a path is that of a file; not by ``.5-7B``."""


class CheckpointFiles:
    """Reads and writes checkpoints of state that is distributed in any way.

    Arguments, errors and who must call are documented at `Booster`'s methods of the same names.

    Args:
        coordinator: Rank facts, and meetings of ranks.
        bucket_bytes: Most memory that saving or loading takes on a rank besides the state, in bytes. A snapshot for
            ``use_async=True`` takes one copy of what this rank writes, in buffers of this size.
        shared_filesystem: Whether the hosts of all ranks see the same files. Found out for each folder by a try when
            ``None``. Where they do not, rank 0's host has all files; checkpoints are then read from each host's own
            copy. ``False`` lets rank 0 write alone.
        timeout_seconds: How long a call waits for ranks that do not make it; the launch's limit when ``None``.

    Attributes:
        write_folder: Writes several parts into one folder and commits them together; see `Saver.save`.

    Raises:
        ConfigError: If ``bucket_bytes`` is below 1 KiB.
    """

    def __init__(
        self,
        coordinator: DistCoordinator,
        *,
        bucket_bytes: int = 64 * _MIB,
        shared_filesystem: bool | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        if bucket_bytes < _MIN_BUCKET_BYTES:
            msg = (
                f"`bucket_bytes={bucket_bytes}` is too small. Use at least {_MIN_BUCKET_BYTES}; the default is 64 MiB."
            )
            raise ConfigError(msg)
        self._session = Session(coordinator, timeout_seconds=timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self._saver = Saver(self._session, bucket_bytes, shared_filesystem=shared_filesystem)
        self.write_folder = self._saver.save

    def save_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
        *,
        module: nn.Module | None = None,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Write a model.

        Args:
            adapter: The model's state.
            checkpoint: As for `Booster.save_model`, like the arguments that follow.
            shard: As there.
            gather_dtensor: As there.
            prefix: As there.
            size_per_shard: As there.
            use_safetensors: As there.
            use_async: As there.
            module: The user's own model; its configuration is written into a folder.
            dtype: Convert floating tensors to this dtype, or to that of their name, where it has one.

        Collective: every rank.
        """
        names = FileNames(base=MODEL, prefix=prefix)
        if not use_safetensors:
            names = FileNames(base=TORCH_MODEL, suffix=TORCH, prefix=prefix)
        part = ModelPart(adapter, names, dtype=dtype, module=module)
        self._save("save_model", part, checkpoint, shard, gather_dtensor, size_per_shard, use_async)

    def save_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write an optimizer's state in safetensors files, and its parameter groups as JSON.

        Collective: every rank.
        """
        part = OptimizerPart(adapter, FileNames(base=OPTIMIZER, prefix=prefix))
        self._save("save_optimizer", part, checkpoint, shard, gather_dtensor, size_per_shard, use_async)

    def load_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        exclude: Sequence[str] = (),
        module: nn.Module | None = None,
        checks: Callable[[Path], CheckedReads | None] = lambda _: None,
    ) -> LoadReport:
        """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

        Everything is checked (names, shapes, dtypes, sizes of files) before the first value is changed. Floating
        values are converted to the model's dtype. For what wins in a folder that holds several forms, see
        `booster_checkpoint.load.source`.

        Args:
            adapter: The model's state.
            checkpoint: As for `Booster.load_model`, like the arguments that follow.
            strict: As there.
            low_cpu_mem_mode: As there.
            num_threads: As there.
            rename: As there.
            exclude: As there.
            module: The user's own model; tells where transformers' files name tensors differently from its modules.
            checks: Returns what verifies a file while it is read, by its path; a training state knows its checksums.

        Collective: every rank.
        """
        path = self.path_at(checkpoint, "load_model")
        self._begin_load("load_model", num_threads)
        return load_model(
            self._session,
            adapter,
            path,
            strict=strict,
            in_memory=not low_cpu_mem_mode,
            num_threads=num_threads,
            bucket_bytes=self._bucket_bytes,
            rename=rename,
            exclude=exclude,
            module=module,
            checks=checks,
        )

    def load_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        num_threads: int = 1,
        *,
        checks: Callable[[Path], CheckedReads | None] = lambda _: None,
    ) -> None:
        """Read an optimizer's state and parameter groups; the groups' options become those of the checkpoint.

        Collective: every rank.
        """
        path = self.path_at(checkpoint, "load_optimizer")
        self._begin_load("load_optimizer", num_threads)
        load_optimizer(
            self._session,
            adapter,
            path,
            in_memory=not low_cpu_mem_mode,
            num_threads=num_threads,
            bucket_bytes=self._bucket_bytes,
            checks=checks,
        )

    def save_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a learning rate scheduler's state as JSON. Functions are not state, and are not written.

        Raises:
            CheckpointError: If the state has no JSON form, or the file cannot be written.

        Collective: every rank.
        """
        path = self.path_at(checkpoint, "save_lr_scheduler")
        text = json.dumps(scheduler_to_json(scheduler), indent=1) + "\n"
        self._saver.save(
            "save_lr_scheduler", path.parent, [], texts={path.name: text}, check=lambda: _check_is_no_folder(path)
        )

    def load_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a learning rate scheduler's state; what it has and the file lacks (functions) stays.

        Raises:
            CheckpointError: If the file is not the state of such a scheduler.

        Collective: every rank.
        """
        path = self.path_at(checkpoint, "load_lr_scheduler")
        self._begin_load("load_lr_scheduler")
        with self._session.together("load_lr_scheduler", path):
            scheduler_from_json(scheduler, read_json(path), str(path))

    def wait(self, name: str = "wait") -> None:
        """Wait until a save that goes on in the background has ended.

        Args:
            name: What the user called; appears in messages.

        Raises:
            CheckpointError: If it failed, on any rank.

        Collective: every rank.
        """
        self._saver.begin(name)

    def when_written(self, call: Callable[[], object]) -> None:
        """Call ``call`` after the save in the background succeeded, or now if there is none.

        Called in the thread that writes, where no process group may be used. An error surfaces as that of the save.

        Collective: none.
        """
        self._saver.background.follow(call)

    def close(self) -> None:
        """Wait, and give back the memory that snapshots are kept in.

        Collective: every rank.
        """
        try:
            self.wait()
        finally:
            self._saver.buffers.release()

    def location(self, checkpoint: str | Path) -> str | Path:
        """Return a URL as it is, and any other path as a `Path`, ``file://`` taken off.

        Collective: none.
        """
        if "://" not in str(checkpoint):
            return Path(checkpoint)
        path = local_path(checkpoint)
        return path if scheme_of(path) else Path(path)

    def path_at(self, checkpoint: str | Path, name: str) -> Path:
        """Return the path of a checkpoint: a `RemotePath` for a URL.

        Args:
            checkpoint: A path or a URL.
            name: What the user called.

        Raises:
            CheckpointError: If there is no storage for the URL, on any rank.

        Collective: every rank, if it is a URL.
        """
        if isinstance(checkpoint, RemotePath):
            return checkpoint
        path = self.location(checkpoint)
        if isinstance(path, Path):
            return path
        with self._session.together(name, Path(path)):
            return path_at(path)

    def _begin_load(self, name: str, num_threads: int = 1) -> None:
        if num_threads < 1:
            msg = f"`num_threads={num_threads}` is not a number of threads. Use 1 or more."
            raise ConfigError(msg)
        self._saver.begin(name)

    def _save(
        self,
        name: str,
        part: Part,
        checkpoint: str | Path,
        shard: bool,  # noqa: FBT001 - as its callers have it
        gather_dtensor: bool,  # noqa: FBT001
        size_per_shard: int,
        use_async: bool,  # noqa: FBT001
    ) -> None:
        """Write a part to the file, folder or URL that a user named."""
        path = self.path_at(checkpoint, name)
        if gather_dtensor:
            folder, check = _place(part, path, shard=shard, size_per_shard=size_per_shard)
            self._saver.save(name, folder, [part], check=check, use_async=use_async)
            return
        for option, is_used in (
            (f"prefix={part.names.prefix!r}", part.names.prefix),
            ("use_async=True", use_async),
        ):
            if is_used:
                msg = (
                    f"`{option}` has no meaning with `gather_dtensor=False`, which leaves writing to torch. Drop "
                    "one of them."
                )
                raise ConfigError(msg)
        from booster_checkpoint.tools.dcp import save_dcp

        self._saver.begin(name)
        if isinstance(path, RemotePath):
            from booster_checkpoint.remote import staged_for

            with staged_for(self._session.coordinator, path, name) as folder:
                save_dcp(name, self._session, part, folder)
        else:
            save_dcp(name, self._session, part, path)


def _place(part: Part, path: Path, *, shard: bool, size_per_shard: int) -> tuple[Path, Callable[[], None]]:
    """Tell a part which files it is written to.

    Returns:
        The files' folder; and a function that raises what is wrong with the path, as it is on this rank's disk.

    Raises:
        ConfigError: If arguments contradict each other.
    """
    names = part.names
    if shard:
        if size_per_shard <= 0:
            msg = f"`size_per_shard={size_per_shard}` is not a size in MiB. The default is 1024."
            raise ConfigError(msg)
        part.max_bytes = size_per_shard * _MIB
        return path, lambda: _check_is_no_file(path, "`shard=True` writes a folder. Pass another path or `shard=False`")
    if isinstance(part, ModelPart) and part.is_pretrained and path.suffix not in _SUFFIXES:
        part.is_alone = True
        why = f"a folder as `from_pretrained` reads it is to be written. Pass another path, or '{path}{names.suffix}'"
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


def _check_is_no_file(path: Path, why: str) -> None:
    if path.exists() and not path.is_dir():
        msg = f"Checkpoint path '{path}' is a file, but {why}."
        raise CheckpointError(msg)


def _check_is_no_folder(path: Path) -> None:
    if path.is_dir():
        msg = (
            f"Checkpoint path '{path}' is a folder, but a file is to be written. Pass a file's path (or `shard=True`)."
        )
        raise CheckpointError(msg)
