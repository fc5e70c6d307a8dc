"""How a step is saved: by all ranks into a folder that is no step yet, which then becomes the latest one.

The order in which it becomes one is drawn in `booster_checkpoint.run.checkpoint_root`.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import EMA, MODEL, OPTIMIZER, FileNames, file_names
from booster_checkpoint.run.checkpoint_root import METRIC, check_is_same_model, has_saved_into, open_run, remember_model
from booster_checkpoint.run.frozen import frozen_part
from booster_checkpoint.run.manifest import FileEntry, Manifest
from booster_checkpoint.run.training_part import TrainingPart
from booster_checkpoint.save.parts import ModelPart, OptimizerPart
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.storage import locate
from booster_core.errors import ConfigError
from booster_core.log import log
from booster_core.state import encode_json, has_adapters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_checkpoint.run.lease import Leases
    from booster_checkpoint.save.parts import Part
    from booster_checkpoint.save.plan import WrittenFile
    from booster_checkpoint.save.save import Saver
    from booster_checkpoint.session import Session
    from booster_core.checkpoint_io import SaveRequest, TrainingState


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
    saver.begin(call, use_async=request.use_async)
    with session.together(call, request.path):
        options.check()
        if request.size_per_shard < 1:
            msg = f"`size_per_shard={request.size_per_shard}` is not a size in MiB. The default is 1024."
            raise ConfigError(msg)
        run = open_run(request.path)
        check_is_same_model(run, options.step, state.model.module)
        training = TrainingPart(state.objects, rank=coordinator.rank, step=options.step, extra=options.extra)
    coordinator.agree(call, {**request.agreed(), "ema": state.ema is not None})
    module = state.model.module
    if not request.save_frozen and module is not None:
        training.frozen = frozen_part(session, call, state.model.adapter, module)
    elif module is not None and has_adapters(module) and not has_saved_into(run):
        log.warning(
            "Each step in '%s' also holds the frozen base. `save_checkpoint(..., save_frozen=False)` leaves it out, "
            "and `load_checkpoint` then checks that the model has the same base.",
            run,
        )
    written_in = ""
    with session.together(call, request.path, for_long=True):
        if coordinator.rank == 0:
            written_in = str(run.prepare_new_folder(options.step, lambda: leases.hold(run)))
    folder = locate(coordinator.broadcast_object(written_in))
    stated = {} if options.metric is None else {METRIC: encode_json(float(options.metric), METRIC)}
    if state.precision is not None:
        stated["precision"] = state.precision.describe()
    stated = {**facts, **stated, "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}

    def commit(written: list[WrittenFile]) -> None:
        leases.hold(run)  # at a URL, the manifest makes it a step
        files = {file.name: FileEntry(nbytes=file.nbytes, blocks=file.blocks) for file in written}
        Manifest(step=options.step, files=files, facts=stated).write(folder)
        run.commit(folder, options, lambda: leases.hold(run))

    parts = _parts_of(state, training, request.size_per_shard << 20)
    target = target_at(folder, is_fresh=True)
    saver.save(parts, target, call, use_async=request.use_async, checksums=True, commit=commit)
    if module is not None:
        remember_model(run, options.step, module)


def _parts_of(state: TrainingState, training: TrainingPart, max_bytes: int) -> list[Part]:
    model, frozen = state.model, training.frozen
    parts: list[Part] = [
        ModelPart(
            model.adapter,
            file_names(model.module),
            max_bytes=max_bytes,
            folder=MODEL,
            dtype=model.dtype,
            left_out=() if frozen is None else frozen["names"],
            module=model.module,
        )
    ]
    if state.optimizer is not None:
        parts.append(OptimizerPart(state.optimizer, FileNames(base=OPTIMIZER), max_bytes=max_bytes, folder=OPTIMIZER))
    if state.ema is not None:
        parts.append(ModelPart(state.ema.adapter, FileNames(base=MODEL, prefix=EMA), max_bytes=max_bytes, folder=EMA))
    return [*parts, training]
