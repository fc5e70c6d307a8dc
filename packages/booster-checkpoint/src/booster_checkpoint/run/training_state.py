"""Saving and loading a whole training state: everything that a run needs to go on as if it had never stopped.

This file holds the order of things. A step is written into a temporary folder by all ranks, described by a manifest,
renamed, and named by ``latest``, each after the one before is on disk (`booster_checkpoint.run.steps`), as long
as no later job saves there (`booster_checkpoint.run.lease`). A load
checks the manifest, sizes and small files before it changes anything; tensors' values are verified while they are read,
so that damage there is found when some values have changed. Random states come last, because loading may draw numbers.
"""

from __future__ import annotations

import itertools
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import EMA, MODEL, OPTIMIZER, FileNames
from booster_checkpoint.load.loading import load_model, load_optimizer
from booster_checkpoint.run.manifest import MANIFEST, FileEntry, Manifest, ReadChecks, damaged, required
from booster_checkpoint.run.steps import METRIC
from booster_checkpoint.run.steps_remote import folder_of, open_steps
from booster_checkpoint.run.training_part import TENSORS, VALUES, SavedTraining, TrainingPart
from booster_checkpoint.save.parts import ModelPart, OptimizerPart
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.storage import path_at
from booster_checkpoint.storage.temporary import new_token
from booster_core.checkpoint_io import NEWEST_WHOLE, LoadedCheckpoint
from booster_core.errors import CheckpointError, ConfigError
from booster_core.log import log
from booster_core.state import encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_checkpoint.run.lease import Leases
    from booster_checkpoint.run.steps import Steps
    from booster_checkpoint.save.parts import Part
    from booster_checkpoint.save.plan import WrittenFile
    from booster_checkpoint.save.save import Saver
    from booster_checkpoint.session import Session
    from booster_core.checkpoint_io import LoadReport, LoadRequest, SaveRequest, TrainingState


def save_step(
    session: Session,
    saver: Saver,
    state: TrainingState,
    request: SaveRequest,
    *,
    leases: Leases,
    facts: Mapping[str, Any],
) -> None:
    """Write a step; see `Booster.save_checkpoint`.

    Args:
        session: The ranks.
        saver: Writes the parts.
        state: What is written.
        request: The call.
        leases: The roots that this engine may save into.
        facts: What the manifest says of the run.

    Collective: every rank.
    """
    coordinator, call, options = session.coordinator, request.call, request.step
    assert options is not None, "of a call that saves a step"
    saver.begin(call)
    where = Path(request.path)
    with session.together(call, where):
        options.check()
        if request.size_per_shard < 1:
            msg = f"`size_per_shard={request.size_per_shard}` is not a size in MiB. The default is 1024."
            raise ConfigError(msg)
        steps = open_steps(request.path)
        training = TrainingPart(state.objects, rank=coordinator.rank, step=options.step, extra=options.extra)
    coordinator.agree(call, {**request.agreed(), "ema": state.ema is not None})
    written_in = ""
    with session.together(call, where, for_long=True):
        if coordinator.rank == 0:
            steps.prepare(lambda: leases.hold(steps))
            written_in = str(steps.temporary(options.step, new_token()))
    temporary = path_at(coordinator.broadcast_object(written_in))
    max_bytes = request.size_per_shard << 20
    model = state.model
    parts: list[Part] = [
        ModelPart(
            model.adapter,
            FileNames(base=MODEL),
            max_bytes=max_bytes,
            folder=MODEL,
            dtype=model.dtype,
            module=model.module,
        )
    ]
    if state.optimizer is not None:
        parts.append(OptimizerPart(state.optimizer, FileNames(base=OPTIMIZER), max_bytes=max_bytes, folder=OPTIMIZER))
    if state.ema is not None:
        parts.append(ModelPart(state.ema.adapter, FileNames(base=MODEL, prefix=EMA), max_bytes=max_bytes, folder=EMA))
    parts.append(training)
    stated = {} if options.metric is None else {METRIC: encode_json(float(options.metric), METRIC)}
    if state.precision is not None:
        stated["precision"] = state.precision.describe()
    stated = {**facts, **stated, "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}

    def commit(written: list[WrittenFile]) -> None:
        leases.hold(steps)  # at a URL, the manifest makes it a step
        files = {file.name: FileEntry(nbytes=file.nbytes, blocks=file.blocks, tensors=file.tensors) for file in written}
        Manifest(step=options.step, files=files, facts=stated).write(temporary)
        steps.commit(temporary, options, lambda: leases.hold(steps))

    target = target_at(temporary, is_fresh=True)
    saver.save(parts, target, call, use_async=request.use_async, checksums=True, commit=commit)


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
    coordinator, call, where, names = session.coordinator, request.call, Path(request.path), list[str]()
    with session.together(call, where, for_long=True):
        request.check()
        steps = open_steps(request.path)
        if coordinator.rank == 0:
            names = _names_to_try(steps, request.wanted_step, leases if request.resume else None)
    names = coordinator.broadcast_object(names)
    if not names:
        return LoadedCheckpoint()
    wanted = _wanted(state)
    for name, next_name in itertools.zip_longest(names, names[1:]):
        folder = folder_of(steps, name)
        manifest, problem, is_one_disk = _look_into(session, folder, wanted, request)
        if problem is None:
            # A tensor that is not loaded, as without `strict`, has no rank that verifies the block it begins in.
            is_shared = is_one_disk and request.strict
            checks = ReadChecks(manifest if request.verify else None, folder, is_shared=is_shared)
            try:
                report, extra = _restore(session, state, folder, request, bucket_bytes=bucket_bytes, checks=checks)
            except CheckpointError:
                problem = _damage_found(session, folder, checks, call) if request.verify else None
                if problem is None:
                    raise
            else:
                path = f"{steps.root.rstrip('/')}/{name}"
                return LoadedCheckpoint(step=manifest.step, extra=extra, path=path, report=report)
        if next_name is None:
            _raise_damaged(session, steps, name, problem, call)
        if coordinator.rank == 0:
            log.warning("%s Trying '%s' instead.", problem, next_name)
    msg = "a load tries one step at least"
    raise AssertionError(msg)


def _restore(
    session: Session,
    state: TrainingState,
    folder: Path,
    request: LoadRequest,
    *,
    bucket_bytes: int,
    checks: ReadChecks,
) -> tuple[LoadReport, Any]:
    """Read a step that looks whole; return what was loaded of the model, and the user's own values.

    Collective: every rank.
    """
    with session.together(request.call, folder):
        saved = SavedTraining(folder)
        saved.check(state.objects, session.world_size, strict=request.strict)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "checks": checks}
    report = load_model(session, state.model, folder / MODEL, request, **options)
    if state.optimizer is not None:
        load_optimizer(session, state.optimizer, folder / OPTIMIZER, request, **options)
    if state.ema is not None:
        load_model(session, state.ema, folder / EMA, request, **options)
    with session.together(request.call, folder):
        saved.restore_objects(state.objects, session.rank)
        extra = saved.extra()
        saved.restore_random_state(state.objects.device, session.rank)
    return report, extra


def _damage_found(session: Session, folder: Path, checks: ReadChecks, call: str) -> str | None:
    """Return what any rank has found damaged while it read, in words; ``None`` if the load failed for another reason.

    Collective: every rank.
    """
    gathered = session.coordinator.all_gather_object(checks.problems, name=f"{call} (damage)")
    found = list(dict.fromkeys(problem for problems in gathered for problem in problems))
    if not found:
        return None
    return f"{damaged(folder, found)} The values of model and optimizer are partly those of this step now."


def has_step(session: Session, root: str | Path) -> bool:
    """Return whether there is a step to load; see `Booster.has_checkpoint`.

    Collective: every rank.
    """
    found = False
    with session.together("has_checkpoint", Path(root)):
        if session.rank == 0:
            steps = open_steps(root)
            found = steps.latest_name() is not None or bool(steps.names())
    return bool(session.coordinator.broadcast_object(found))


def _raise_damaged(session: Session, steps: Steps, name: str, problem: str, call: str) -> None:
    """Raise on every rank what is wrong with a step, and which other one to load; rank 0 looks for it."""
    with session.together(call, Path(steps.root), for_long=True):
        if session.rank == 0:
            raise CheckpointError(problem + steps.advice(name))


def _wanted(state: TrainingState) -> list[str]:
    """Return the files and folders of a step that a state is read from."""
    wanted = [MODEL, VALUES, TENSORS]
    wanted += [OPTIMIZER] if state.optimizer is not None else []
    return wanted + ([EMA] if state.ema is not None else [])


def _names_to_try(steps: Steps, step: int | str, leases: Leases | None) -> list[str]:
    """Return the folders of steps to load from, the first that is whole; on rank 0.

    Args:
        steps: The steps of the root.
        step: What was asked for.
        leases: Where the run goes on saving there: takes the lease, so that an earlier job no longer removes steps.
    """
    if leases is not None:
        if not steps.names() and steps.latest_name() is None:
            return []
        try:
            leases.take(steps)
        except OSError as error:
            log.warning("'%s' can be loaded from, but not saved into: %s.", steps.root, error)
    return steps.candidates() if step == NEWEST_WHOLE else [steps.find(step)]


def _look_into(
    session: Session, folder: Path, wanted: list[str], request: LoadRequest
) -> tuple[Manifest, str | None, bool]:
    """Check a step against its manifest, as far as nothing is verified while it is read.

    Ranks that see the same files share the work.

    Returns:
        The manifest, what is damaged, and whether all ranks see the same files; the same on every rank.

    Raises:
        CheckpointError: If the step lacks what is wanted.
    """
    manifest, problem = Manifest(step=0, files={}), None
    if session.rank == 0:
        try:
            Manifest.read(folder)
        except CheckpointError as error:
            problem = str(error)
    problem = session.coordinator.broadcast_object(problem)
    if problem is not None:
        return manifest, problem, False
    with session.together(request.call, folder):
        manifest = Manifest.read(folder)
        required(manifest, folder, wanted)
        status = (folder / MANIFEST).stat()
    # The same file, by number and time, is the same disk, whatever it is called on each host.
    disks = session.coordinator.all_gather_object((status.st_ino, status.st_mtime_ns, status.st_size))
    mates = [rank for rank, disk in enumerate(disks) if disk == disks[session.rank]]
    names = [file for file in manifest.files if any(file == want or file.startswith(f"{want}/") for want in wanted)]
    own = names[mates.index(session.rank) :: len(mates)]
    with session.together(request.call, folder, for_long=True):
        problems = manifest.size_problems(folder, own)
        if request.verify and not problems:
            ahead = [file for file in own if file == TENSORS or not manifest.files[file].is_read_checked]
            problems = manifest.content_problems(folder, ahead)
    found = [problem for problems in session.coordinator.all_gather_object(problems) for problem in problems]
    problem = str(damaged(folder, list(dict.fromkeys(found)))) if found else None
    return manifest, problem, len(mates) == session.world_size
