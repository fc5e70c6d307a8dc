"""How a load goes: everything is checked on all ranks before the first value is changed on any."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError
from booster_runtime.checkpoint.files.layout import MODEL, OPTIMIZER
from booster_runtime.checkpoint.files.optimizer_info import OptimizerInfo
from booster_runtime.checkpoint.load.compare import Expectation, compare
from booster_runtime.checkpoint.load.optimizer_check import (
    check_same_parameters,
    check_states,
    listed_states,
    read_optimizer_info,
    states_by_parameter,
)
from booster_runtime.checkpoint.load.read_ahead import read_ahead
from booster_runtime.checkpoint.load.reader import ShardReader
from booster_runtime.checkpoint.load.source import Source, open_source
from booster_runtime.checkpoint.load.transformers_names import renamed
from booster_runtime.checkpoint.session import Progress
from booster_runtime.storage import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import nn

    from booster_core.checkpoint_io import LoadReport
    from booster_core.state import StateAdapter, TensorShard
    from booster_runtime.checkpoint.files.checksums import CheckedReads
    from booster_runtime.checkpoint.session import Session

    Checks = Callable[[Path], CheckedReads | None]
    """Returns what verifies a file while it is read; ``None`` for a file without checksums."""


def load_model(
    session: Session,
    adapter: StateAdapter,
    path: Path,
    *,
    strict: bool,
    in_memory: bool,
    num_threads: int,
    bucket_bytes: int,
    module: nn.Module | None,
    checks: Checks,
) -> LoadReport:
    """Read a model; see `CheckpointFiles.load_model`.

    Collective: every rank.
    """
    with ExitStack() as stack:
        source: Source | None = None
        extra: tuple[str, ...] = ()

        def look() -> Expectation:
            nonlocal source, extra
            source = stack.enter_context(open_source(path, MODEL, in_memory=in_memory, checks=checks))
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
            is_shown = session.rank == 0
            targets: Iterable[TensorShard] = adapter.model_targets(
                {name: source.tensors[key] for name, key in homes.items()}
            )
            if isinstance(path, RemotePath) and adapter.keeps_values:
                targets = read_ahead(source, targets, homes, bucket_bytes)
            _fill("Loading model", source, targets, homes, num_threads, bucket_bytes, is_shown=is_shown)
            adapter.load_extra_state(source.extra_values(extra))
    # Not inside of `together`: an adapter may communicate here, and then all ranks fail or none.
    adapter.finish_load(model=True, optimizer=False)
    return report


def load_optimizer(
    session: Session,
    adapter: StateAdapter,
    path: Path,
    *,
    in_memory: bool,
    num_threads: int,
    bucket_bytes: int,
    checks: Checks,
) -> None:
    """Read an optimizer; see `CheckpointFiles.load_optimizer`.

    Collective: every rank.
    """
    with ExitStack() as stack:
        source: Source | None = None
        saved: OptimizerInfo | None = None

        def look() -> list[Any]:
            nonlocal source, saved
            source = stack.enter_context(open_source(path, OPTIMIZER, in_memory=in_memory, checks=checks))
            saved = read_optimizer_info(source)
            return OptimizerInfo.of(adapter).entries()

        here = OptimizerInfo.merge(session.gather_each("load_optimizer", path, look))
        assert source is not None, "opened on every rank, or on none"
        assert saved is not None, "read with it"
        check_same_parameters(path, saved, here)
        states = states_by_parameter(path, source.tensors, here)
        adapter.prepare_optimizer_load(states, saved.scalars, saved.groups)
        tensors = source.tensors
        check_states(path, tensors, session.gather("load_optimizer", path, lambda: listed_states(adapter, tensors)))
        with session.together("load_optimizer", path):
            homes, is_shown = {key: key for key in tensors}, session.rank == 0
            shards: Iterable[TensorShard] = adapter.optimizer_shards()
            if isinstance(path, RemotePath) and adapter.keeps_values:
                shards = read_ahead(source, shards, homes, bucket_bytes)
            _fill("Loading optimizer", source, shards, homes, num_threads, bucket_bytes, is_shown=is_shown)
    adapter.finish_load(model=False, optimizer=True)


def _fill(
    title: str,
    source: Source,
    shards: Iterable[Any],
    homes: Mapping[str, str],
    num_threads: int,
    bucket_bytes: int,
    *,
    is_shown: bool,
) -> None:
    """Read the shards whose tensors have a home in the checkpoint."""
    with (
        Progress(title, source.total_bytes, is_shown=is_shown) as progress,
        ShardReader(source, bucket_bytes, num_threads=num_threads, progress=progress.advance) as reader,
    ):
        for shard in shards:
            if shard.key in homes and shard.numel:
                reader.fill(shard, homes[shard.key])
