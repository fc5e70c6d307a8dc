"""How a step is loaded: which one, whether it is whole and fits, and then its values.

Before anything changes, the manifest, all sizes, the small files and everything that can be known from names, shapes
and kinds are checked, of model, optimizer, averages, schedulers and the rest. Tensors' values are verified while they
are read, so that damage there is found when some values have changed; the error says so. Random states come last,
because loading may draw numbers.

What is absent or damaged makes an older step the newest one. What can't be read says nothing of the step: it raises,
and a run that is started again when the disk or the storage answers has lost nothing.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import EMA, MODEL, OPTIMIZER
from booster_checkpoint.load.load import ModelLoad, OptimizerLoad, changing
from booster_checkpoint.run.checkpoint_root import forget_model, open_run
from booster_checkpoint.run.frozen import check_frozen
from booster_checkpoint.run.manifest import MANIFEST, Manifest, ReadChecks, damaged, required
from booster_checkpoint.run.training_part import TENSORS, VALUES, SavedTraining
from booster_core.checkpoint_io import NEWEST_WHOLE, LoadedCheckpoint
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
    StorageUnreachableError,
)
from booster_core.log import log

if TYPE_CHECKING:
    from pathlib import Path

    from booster_checkpoint.run.checkpoint_root import CheckpointRoot
    from booster_checkpoint.run.lease import Leases
    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.checkpoint_io import LoadReport, LoadRequest, TrainingState


def load_step(
    session: Session, state: TrainingState, request: LoadRequest, *, leases: Leases, bucket_bytes: int
) -> LoadedCheckpoint:
    """Read a step; see `Booster.load_checkpoint`.

    Args:
        session: The ranks.
        state: What is written into.
        request: The call. Without ``strict``, registered objects that don't fit are left out, too.
        leases: The roots that this engine may save into.
        bucket_bytes: Most memory to use besides the state, in bytes.

    Collective: every rank.
    """
    coordinator, call, names = session.coordinator, request.call, list[str]()
    with session.together(call, request.path, for_long=True):
        request.check()
        run = open_run(request.path)
        forget_model(run)
        if coordinator.rank == 0:
            names = _names_to_try(run, request.wanted_step, leases if request.resume else None)
    names = coordinator.broadcast_object(names)
    if not names:
        return LoadedCheckpoint()
    for name, next_name in itertools.zip_longest(names, names[1:]):
        folder = run.folder(name)
        try:
            manifest, checks = _check_ahead(session, folder, _wanted(state), request)
            report, extra = _restore(
                session, state, folder, request, manifest, bucket_bytes=bucket_bytes, checks=checks
            )
        except (CheckpointUnreadableError, StorageUnreachableError) as error:
            _raise_with_advice(session, run, name, error, call)
        except (CheckpointAbsentError, CheckpointDamagedError) as error:
            if next_name is None:
                _raise_with_advice(session, run, name, error, call)
            if coordinator.rank == 0:
                log.warning("%s Trying '%s' instead.", error, next_name)
        else:
            path = f"{run}".rstrip("/") + f"/{name}"
            return LoadedCheckpoint(step=manifest.step, extra=extra, path=path, report=report)
    msg = "a load tries one step at least"
    raise AssertionError(msg)


def has_step(session: Session, root: str | Path) -> bool:
    """Return whether there is a step to load; see `Booster.has_checkpoint`.

    Collective: every rank.
    """
    found = False
    with session.together("has_checkpoint", root):
        if session.rank == 0:
            found = open_run(root).exists()
    return bool(session.coordinator.broadcast_object(found))


def _wanted(state: TrainingState) -> list[str]:
    """Return the files and folders of a step that a state is read from."""
    wanted = [MODEL, VALUES, TENSORS]
    wanted += [OPTIMIZER] if state.optimizer is not None else []
    return wanted + ([EMA] if state.ema is not None else [])


def _names_to_try(run: CheckpointRoot, step: int | str, leases: Leases | None) -> list[str]:
    """Return the folders of steps to load from, the first that is whole; on rank 0.

    Args:
        run: The steps of the root.
        step: What was asked for.
        leases: Where the run goes on saving there: takes the lease, so that an earlier job no longer removes steps.
    """
    if leases is not None:
        if not run.exists():
            return []
        try:
            leases.take(run)
        except OSError as error:
            log.warning("'%s' can be loaded from, but not saved into: %s.", run, error)
    return run.candidates() if step == NEWEST_WHOLE else [run.find(step)]


def _check_ahead(
    session: Session, folder: Location, wanted: list[str], request: LoadRequest
) -> tuple[Manifest, ReadChecks]:
    """Check a step against its manifest, as far as nothing is verified while it is read.

    Ranks that see the same files share the work.

    Raises:
        CheckpointAbsentError, CheckpointDamagedError: If it is not whole.
        CheckpointError: If the step lacks what is wanted, or can't be read.

    Collective: every rank.
    """
    manifest, mates = _read_manifest(session, folder, request.call)
    with session.together(request.call, folder):
        required(manifest, folder, wanted)
    own = manifest.below(wanted)[mates.index(session.rank) :: len(mates)]

    def look() -> list[str]:
        problems = manifest.size_problems(folder, own)
        if request.verify and not problems:
            ahead = [file for file in own if file == TENSORS or not manifest.is_read_checked(file)]
            problems = manifest.content_problems(folder, ahead)
        return problems

    told = session.gather(request.call, folder, look)
    problems = list(dict.fromkeys(problem for problems in told for problem in problems))
    if problems:
        raise damaged(folder, problems)
    # A tensor that is not loaded, as without `strict`, has no rank that verifies the block it begins in.
    is_shared = len(mates) == session.world_size and request.strict
    return manifest, ReadChecks(manifest if request.verify else None, folder, is_shared=is_shared)


def _read_manifest(session: Session, folder: Location, call: str) -> tuple[Manifest, list[int]]:
    """Return a step's manifest, which one rank of each host reads, and the ranks that see the same files as this one.

    Collective: every rank.
    """
    hosts = session.hosts()
    reader = hosts.index(hosts[session.rank])

    def look() -> tuple[bytes | None, tuple[int, ...]]:
        if session.rank != reader:
            return None, ()
        return (folder / MANIFEST).read_bytes(), (folder / MANIFEST).stamp()

    told = session.gather(call, folder, look)
    written, disk = told[reader]
    mates = [rank for rank, host in enumerate(hosts) if told[hosts.index(host)][1] == disk]
    with session.together(call, folder):
        manifest = Manifest.parse(written, folder)
    return manifest, mates


def _restore(
    session: Session,
    state: TrainingState,
    folder: Location,
    request: LoadRequest,
    manifest: Manifest,
    *,
    bucket_bytes: int,
    checks: ReadChecks,
) -> tuple[LoadReport, Any]:
    """Read a step that looks whole; return what was loaded of the model, and the user's own values.

    Collective: every rank.
    """
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "checks": checks}
    is_changing = False
    with ExitStack() as stack:
        try:
            with session.together(request.call, folder):
                saved = SavedTraining(folder)
                saved.check(state.objects, session.world_size, strict=request.strict)
                saved.read(session.rank, state.objects.data_index)
            left_out = () if saved.frozen is None else saved.frozen["names"]
            if saved.frozen is not None and request.strict:
                check_frozen(session, request.call, state.model.adapter, folder, saved.frozen)
            listed = manifest.folder(MODEL)
            model = ModelLoad(
                session, state.model, folder / MODEL, request, stack, listed=listed, left_out=left_out, **options
            )
            loads: list[ModelLoad | OptimizerLoad] = [model]
            if state.optimizer is not None:
                listed = manifest.folder(OPTIMIZER)
                loads.append(
                    OptimizerLoad(
                        session, state.optimizer, folder / OPTIMIZER, request, stack, listed=listed, **options
                    )
                )
            if state.ema is not None:
                listed = manifest.folder(EMA)
                loads.append(ModelLoad(session, state.ema, folder / EMA, request, stack, listed=listed, **options))
            is_changing = True
            with changing("model and optimizer"):
                for load in loads:
                    load.run()
        except CheckpointError as error:
            found = _damage_found(session, checks, request.call)
            if found:
                raise damaged(folder, found, has_changed=is_changing) from error
            raise
        with session.together(request.call, folder):
            saved.restore_objects(state.objects)
            saved.restore_random_state(state.objects.device)
    return model.report, saved.extra


def _damage_found(session: Session, checks: ReadChecks, call: str) -> list[str]:
    """Return what any rank has found damaged while it read, in words.

    Collective: every rank.
    """
    gathered = session.coordinator.all_gather_object(checks.problems, name=f"{call} (damage)")
    return list(dict.fromkeys(problem for problems in gathered for problem in problems))


def _raise_with_advice(session: Session, run: CheckpointRoot, name: str, error: CheckpointError, call: str) -> None:
    """Raise on every rank what is wrong with a step, and which other one to load; rank 0 looks for it."""
    with session.together(call, run, for_long=True):
        if session.rank == 0:
            msg = f"{error}{run.advice(name)}"
            raise type(error)(msg) from error
