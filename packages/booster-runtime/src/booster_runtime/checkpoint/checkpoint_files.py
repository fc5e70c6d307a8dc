"""`CheckpointFiles`: saves and loads models, optimizers and schedulers under any plugin, through its `StateAdapter`.

This file holds what callers see: who checks what before anything moves, and how loads go. How a save goes, how files
look, what goes where, and how bytes move is in the modules next to it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.checkpoint.files.index import read_json
from booster_runtime.checkpoint.files.names import MODEL, OPTIMIZER, SAFETENSORS, TORCH, TORCH_MODEL, FileNames
from booster_runtime.checkpoint.load.compare import Expectation, compare
from booster_runtime.checkpoint.load.optimizer_check import (
    check_same_parameters,
    check_states,
    listed_states,
    read_optimizer_info,
    states_by_parameter,
)
from booster_runtime.checkpoint.load.reader import ShardReader
from booster_runtime.checkpoint.load.source import Source, open_source
from booster_runtime.checkpoint.load.transformers_names import renamed
from booster_runtime.checkpoint.progress import Progress
from booster_runtime.checkpoint.run.scheduler import scheduler_from_json, scheduler_to_json
from booster_runtime.checkpoint.save.parts import ModelPart, OptimizerInfo, OptimizerPart, Part
from booster_runtime.checkpoint.save.pretrained_files import pretrained_files
from booster_runtime.checkpoint.save.saver import Saver
from booster_runtime.checkpoint.save.target import check_is_no_folder, target_of
from booster_runtime.checkpoint.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.checkpoint_io import LoadReport
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter
    from booster_runtime.checkpoint.save.job import WrittenFile

_MIB = 1 << 20
_MIN_BUCKET_BYTES = 1024


class CheckpointFiles:
    """Reads and writes checkpoints of state that is distributed in any way.

    Args:
        coordinator: Rank facts and rendezvous.
        bucket_bytes: Most memory that saving or loading takes on a rank besides the state, in bytes. A snapshot for
            ``use_async=True`` takes one copy of what this rank writes, in buffers of this size.
        shared_filesystem: Whether all ranks see the same files. Found out for each folder by a try when ``None``.
            Where they do not, rank 0 writes what the others send; checkpoints are then read from each host's own copy.
        timeout_seconds: How long a call waits for ranks that do not make it; the launch's limit when ``None``.

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
        self._session = Session(coordinator, shared_filesystem=shared_filesystem, timeout_seconds=timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self._saver = Saver(self._session, bucket_bytes)

    # What users call, by way of `Booster` ----------------------------------------------------------------------------

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
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a model in the layout of Hugging Face libraries.

        Args:
            adapter: The model's state.
            checkpoint: A file, or with ``shard=True`` a folder. Folders are made as needed; older files are replaced.
            shard: Write a folder with numbered files, their index, and the model's ``config.json``.
            gather_dtensor: ``False`` writes a folder of ``torch.distributed.checkpoint`` instead.
            prefix: Put into the file names of a folder, as Hugging Face's ``variant``.
            size_per_shard: Largest size of a numbered file in MiB. A tensor that is larger gets a file of its own.
            use_safetensors: Write safetensors; ``False`` writes what ``torch.save`` of a dict writes.
            use_async: Copy the values, return, and write in the background. An error is raised by the next save, load,
                `wait`, or the interpreter's exit.
            module: The user's own model; its configuration is written where ``shard=True``.
            dtype: Convert floating tensors to this dtype.

        Raises:
            ConfigError: If arguments contradict each other.
            CheckpointError: If the checkpoint cannot be written. It is then as it was before.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        if not gather_dtensor:
            self._refuse_for_dcp(prefix=prefix, use_async=use_async)
            from booster_runtime.checkpoint.tools.dcp import save_model_dcp

            self._begin("save_model")
            save_model_dcp(self._session, adapter, Path(checkpoint), dtype, module)
            return
        suffix = SAFETENSORS if use_safetensors else TORCH
        names = FileNames(base=MODEL if use_safetensors else TORCH_MODEL, suffix=suffix, prefix=prefix)
        target = target_of(checkpoint, names, shard=shard, prefix=prefix, size_per_shard=size_per_shard)
        texts = pretrained_files(module, dtype) if module is not None and shard else {}
        part = ModelPart(
            adapter,
            names,
            max_bytes=target.max_bytes,
            file_name=target.file_name,
            dtype=dtype,
            texts=texts,
            module=module,
        )
        self._saver.save("save_model", target.folder, [part], check=target.check, use_async=use_async)

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

        Args:
            adapter: The optimizer's state.
            checkpoint: A file, or with ``shard=True`` a folder. It may be the model's.
            shard: Write a folder with numbered files, their index, and ``param_groups.json``.
            gather_dtensor: As in `save_model`.
            prefix: As in `save_model`.
            size_per_shard: As in `save_model`.
            use_async: As in `save_model`.

        Raises:
            ConfigError: If arguments contradict each other.
            CheckpointError: If the checkpoint cannot be written. It is then as it was before.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        if not gather_dtensor:
            self._refuse_for_dcp(prefix=prefix, use_async=use_async)
            from booster_runtime.checkpoint.tools.dcp import save_optimizer_dcp

            self._begin("save_optimizer")
            save_optimizer_dcp(self._session, adapter, Path(checkpoint))
            return
        names = FileNames(base=OPTIMIZER, prefix=prefix)
        target = target_of(checkpoint, names, shard=shard, prefix=prefix, size_per_shard=size_per_shard)
        part = OptimizerPart(adapter, names, max_bytes=target.max_bytes, file_name=target.file_name)
        self._saver.save("save_optimizer", target.folder, [part], check=target.check, use_async=use_async)

    def load_model(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        module: nn.Module | None = None,
    ) -> LoadReport:
        """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

        Everything is checked (names, shapes, dtypes, sizes of files) before the first value is changed. Floating
        values are converted to the model's dtype.

        Args:
            adapter: The model's state.
            checkpoint: A file, an index, or a folder; see `booster_runtime.checkpoint.load.source` for what wins in a
                folder that holds several forms.
            strict: Raise unless model and checkpoint hold the same tensors. ``False`` loads those that fit.
            low_cpu_mem_mode: Read just the parts that this rank holds, straight into place. ``False`` reads whole files
                into memory first, one after the other, which a disk that is slow at jumping may prefer.
            num_threads: How many parts of a large tensor are read at once.
            module: The user's own model; tells where transformers' files name tensors differently from its modules.

        Returns:
            What was loaded and what was not; the same on every rank.

        Raises:
            ConfigError: If ``num_threads`` is not positive.
            CheckpointError: If the checkpoint cannot be read, is damaged, or with ``strict`` does not fit.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        _check_threads(num_threads)
        self._begin("load_model")
        path, session = Path(checkpoint), self._session
        with ExitStack() as stack:
            source: Source | None = None
            extra: tuple[str, ...] = ()

            def look() -> Expectation:
                nonlocal source, extra
                source = stack.enter_context(open_source(path, MODEL, in_memory=not low_cpu_mem_mode))
                extra = tuple(adapter.extra_state())
                return Expectation.of(adapter, extra)

            expected = Expectation.merge(session.gather("load_model", path, look))
            assert source is not None, "opened on every rank, or on none"
            names = renamed(module, source.tensors, (*expected.tensors, *expected.aliases, *expected.extra))
            stored = {name: source.tensors[key] for name, key in names.items()}
            report, found = compare(stored, source.values, expected)
            homes = {name: names[key] for name, key in found.items()}
            if strict and not report.is_complete:
                msg = f"'{path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
                raise CheckpointError(msg)
            with session.together("load_model", path):
                self._fill("Loading model", source, adapter.model_shards(), homes, num_threads)
                adapter.load_extra_state(source.extra_values(extra))
        # Not inside of `together`: an adapter may communicate here, and then all ranks fail or none.
        adapter.finish_load(model=True, optimizer=False)
        return report

    def load_optimizer(
        self,
        adapter: StateAdapter,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state and parameter groups; the groups' options become those of the checkpoint.

        Args:
            adapter: The optimizer's state.
            checkpoint: A file, an index, or a folder.
            low_cpu_mem_mode: As in `load_model`.
            num_threads: As in `load_model`.

        Raises:
            ConfigError: If ``num_threads`` is not positive.
            CheckpointError: If the checkpoint cannot be read, is damaged, or is of another model's optimizer.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        _check_threads(num_threads)
        self._begin("load_optimizer")
        path, session = Path(checkpoint), self._session
        with ExitStack() as stack:
            source: Source | None = None
            saved: OptimizerInfo | None = None

            def look() -> OptimizerInfo:
                nonlocal source, saved
                source = stack.enter_context(open_source(path, OPTIMIZER, in_memory=not low_cpu_mem_mode))
                saved = read_optimizer_info(source)
                return OptimizerInfo.of(adapter)

            here = OptimizerInfo.merge(session.gather("load_optimizer", path, look))
            assert source is not None, "opened on every rank, or on none"
            assert saved is not None, "read with it"
            check_same_parameters(path, saved, here)
            states = states_by_parameter(path, source.tensors, here)
            adapter.prepare_optimizer_load(states, saved.scalars, saved.groups)
            listed = session.gather("load_optimizer", path, lambda: listed_states(adapter, source.tensors))
            check_states(path, source.tensors, listed)
            with session.together("load_optimizer", path):
                homes = {key: key for key in source.tensors}
                self._fill("Loading optimizer", source, adapter.optimizer_shards(), homes, num_threads)
        adapter.finish_load(model=False, optimizer=True)

    def save_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a learning rate scheduler's state as JSON.

        Args:
            scheduler: Any of torch's schedulers, or one whose ``state_dict`` holds plain values. Functions are not
                state, and are not written.
            checkpoint: The file.

        Raises:
            CheckpointError: If the state has no JSON form, or the file cannot be written.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        path = Path(checkpoint)
        text = json.dumps(scheduler_to_json(scheduler), indent=1) + "\n"
        self._saver.save(
            "save_lr_scheduler", path.parent, [], texts={path.name: text}, check=lambda: check_is_no_folder(path)
        )

    def load_lr_scheduler(self, scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a learning rate scheduler's state.

        Args:
            scheduler: The scheduler; what it has and the file lacks (functions) stays.
            checkpoint: The file.

        Raises:
            CheckpointError: If the file is not the state of such a scheduler.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        self._begin("load_lr_scheduler")
        path = Path(checkpoint)
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
        self._begin(name)

    def when_written(self, call: Callable[[], object]) -> None:
        """Call something when what goes on in the background has been written well; at once where nothing does.

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

    # What a whole training state is written with ---------------------------------------------------------------------

    def write_folder(
        self,
        name: str,
        folder: Path,
        parts: Sequence[Part],
        *,
        texts: Mapping[str, str] | None = None,
        use_async: bool = False,
        want_checksums: bool = False,
        commit: Callable[[list[WrittenFile]], None] | None = None,
    ) -> list[WrittenFile]:
        """Write several parts into one folder, and commit them together.

        The folder itself is not renamed; ``commit`` may do that. Files have their own names when it runs,
        synced, after every rank has written. If anything fails, on any rank, ``commit`` has not been called.

        Args:
            name: What the user called; appears in messages.
            folder: Where the files go; made if it does not exist.
            parts: Models and optimizers.
            texts: Further files and their content; those of all ranks are written, the lowest rank's of equal names.
            use_async: Copy all values, return, and do the rest in the background, ``commit`` too.
            want_checksums: Tell each file's xxh3 in the list.
            commit: Called on rank 0 with the list of files; with ``use_async`` in a thread, where it must not use
                process groups.

        Returns:
            The files, on rank 0; an empty list elsewhere, and with ``use_async``.

        Raises:
            CheckpointError: If anything failed on any rank.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        return self._saver.save(
            name, folder, parts, texts=texts, use_async=use_async, want_checksums=want_checksums, commit=commit
        )

    # How it is done --------------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        """Meet all ranks, when the save before is through."""
        self._session.begin(name, self._saver.background.join())

    def _refuse_for_dcp(self, *, prefix: str | None, use_async: bool) -> None:
        for option, is_used in (("use_async=True", use_async), (f"prefix={prefix!r}", prefix is not None)):
            if is_used:
                msg = (
                    f"`{option}` has no meaning with `gather_dtensor=False`, which leaves writing to torch. Drop one "
                    "of them."
                )
                raise ConfigError(msg)

    def _fill(
        self, title: str, source: Source, shards: Iterable[Any], homes: Mapping[str, str], num_threads: int
    ) -> None:
        """Read the shards whose tensors have a home in the checkpoint."""
        total = source.total_bytes
        is_shown = self._session.rank == 0
        with (
            Progress(title, total, is_shown=is_shown) as progress,
            ShardReader(source, self._bucket_bytes, num_threads=num_threads, progress=progress.advance) as reader,
        ):
            for shard in shards:
                if shard.key in homes and shard.numel:
                    reader.fill(shard, homes[shard.key])


def _check_threads(num_threads: int) -> None:
    if num_threads < 1:
        msg = f"`num_threads={num_threads}` is not a number of threads. Use 1 or more."
        raise ConfigError(msg)
