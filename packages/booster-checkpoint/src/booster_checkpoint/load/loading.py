"""How a load goes: everything is checked on all ranks before the first value is changed on any."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import MODEL, OPTIMIZER
from booster_checkpoint.load.fill import Fill
from booster_checkpoint.load.naming import as_model_names, excluder
from booster_checkpoint.load.optimizer_check import read_optimizer_info
from booster_checkpoint.load.optimizer_positions import by_name, is_positional
from booster_checkpoint.load.source import Source, open_source
from booster_core.errors import CheckpointError
from booster_core.matching import (
    Expectation,
    check_same_parameters,
    check_states,
    compare,
    listed_states,
    states_by_parameter,
)
from booster_core.state import OptimizerInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.load.reader import ReadableTensors
    from booster_checkpoint.session import Session
    from booster_core.checkpoint_io import LoadReport, LoadRequest, ModelState
    from booster_core.state import StateAdapter

    Checks = Callable[[Path], CheckedReads | None]
    """Returns what verifies a file while it is read; ``None`` for a file without checksums."""


def load_model(
    session: Session,
    state: ModelState,
    path: Path,
    request: LoadRequest,
    *,
    bucket_bytes: int,
    checks: Checks = lambda _: None,
) -> LoadReport:
    """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

    Everything is checked (names, shapes, dtypes, sizes of files) before the first value is changed. Floating
    values are converted to the model's dtype. For what wins in a folder that holds several forms, see
    `booster_checkpoint.load.source`.

    Args:
        session: The ranks.
        state: The model.
        path: The request's path, or a folder below it.
        request: The call.
        bucket_bytes: Most memory to use besides the shards, in bytes.
        checks: Returns what verifies a file while it is read, by its path; a training state knows its checksums.

    Raises:
        CheckpointError: If the checkpoint can't be read, is damaged, or does not fit.

    Collective: every rank.
    """
    adapter, call = state.adapter, request.call
    with ExitStack() as stack:
        source: Source | None = None
        extra: tuple[str, ...] = ()

        def look() -> Expectation:
            nonlocal source, extra
            source = stack.enter_context(
                open_source(path, MODEL, in_memory=not request.low_cpu_mem_mode, checks=checks)
            )
            is_out = excluder(request.exclude)
            extra = tuple(name for name in adapter.extra_state() if not is_out(name))
            found = Expectation.of(adapter, extra)
            kept = {name: meta for name, meta in found.tensors.items() if not is_out(name)}
            return replace(found, tensors=kept)

        expected = Expectation.merge(session.gather(call, path, look))
        assert source is not None, "opened on every rank, or on none"
        with session.together(call, path):
            known = (*expected.tensors, *expected.aliases, *expected.extra)
            named = as_model_names(source, state.module, known, rename=request.rename, exclude=request.exclude)
        report, homes = compare(named.tensors, named.values, expected)
        if request.strict and not report.is_complete:
            msg = f"'{path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
            raise CheckpointError(msg)
        metas = {name: named.tensors[key] for name, key in homes.items()}
        stored = {name: single for name, key in homes.items() if (single := named.layouts[key].single)}
        fill = Fill(session, call, path, source, named, homes, stored, request.num_threads, bucket_bytes)
        fill.run(lambda: adapter.model_targets(metas), keeps_values=adapter.keeps_values)
        with session.together(call, path):
            adapter.load_extra_state(named.extra_values(extra))
    # Not inside of `together`: an adapter may communicate here, and then all ranks fail or none.
    adapter.finish_load(model=True, optimizer=False)
    return report


def load_optimizer(
    session: Session,
    adapter: StateAdapter,
    path: Path,
    request: LoadRequest,
    *,
    bucket_bytes: int,
    checks: Checks = lambda _: None,
) -> None:
    """Read an optimizer's state and parameter groups; the groups' options become those of the checkpoint.

    Arguments and errors are those of `load_model`.

    Collective: every rank.
    """
    call = request.call
    with ExitStack() as stack:
        source: Source | None = None
        saved: OptimizerInfo | None = None

        def look() -> list[Any]:
            nonlocal source, saved
            source = stack.enter_context(
                open_source(path, OPTIMIZER, in_memory=not request.low_cpu_mem_mode, checks=checks)
            )
            saved = None if is_positional(source) else read_optimizer_info(source)
            return OptimizerInfo.of(adapter).entries()

        gathered = session.gather_each(call, path, look)
        here = OptimizerInfo.merge(gathered)
        assert source is not None, "opened on every rank, or on none"
        named: ReadableTensors = source
        if saved is None:
            with session.together(call, path):
                named, saved = by_name(source, here, [groups for groups, *_ in gathered])
        assert saved is not None, "an error was raised on every rank"
        check_same_parameters(path, saved, here)
        states = states_by_parameter(path, named.tensors, here)
        adapter.prepare_optimizer_load(states, saved.scalars, saved.groups)
        tensors = named.tensors
        check_states(path, tensors, session.gather(call, path, lambda: listed_states(adapter, tensors)))
        homes = {key: key for key in tensors}
        stored = homes if named is source else {}
        fill = Fill(session, call, path, source, named, homes, stored, request.num_threads, bucket_bytes)
        fill.run(adapter.optimizer_shards, keeps_values=adapter.keeps_values)
    adapter.finish_load(model=False, optimizer=True)
