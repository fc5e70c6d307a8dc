"""What `Booster.boost` and plugins do with a lazy model before a strategy lays it out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from booster_core.errors import ConfigError, LazyInitError
from booster_core.plugin import as_tuple, place_model, rebind
from booster_runtime.lazy.holders import find_elsewhere
from booster_runtime.lazy.host import StateOnHost, compare_hosts, shards_from_host
from booster_runtime.lazy.recording import Recording, ReplaySource, fill_elsewhere, is_lazy, take_recording
from booster_runtime.sharding.broadcast import agree_on_values, send_first
from booster_runtime.sharding.ranks import raised_on_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, Boosted
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator, Together

_TAKEN = "_booster_has_given_values"
"""Attribute of a model that was lazy, and whose values a `boost` has taken."""


def check_not_taken(model: object) -> None:
    """Raise if a model was lazy and a `boost` that raised has taken its values: they may be anywhere or lost.

    Raises:
        ConfigError: If so.
    """
    if _TAKEN in getattr(model, "__dict__", {}):
        msg = "This model was lazy, and a `boost` that raised has taken its values. Build another model."
        raise ConfigError(msg)


def begin_lazy(
    objects: Boosted, context: BoostContext, placeholders: Literal["device", "own"] | None
) -> Recording | None:
    """Give a lazy model its values, or put placeholders in their place; see `Strategy.placeholders`.

    Returns:
        What fills the placeholders; ``None`` where the model has its values now, or all is left to the strategy.

    Collective: every rank of the world.
    """
    model = objects.model
    with raised_on_all("boost", context.device):
        # First, so that a strategy finds optimizer state with values.
        fill_elsewhere(find_elsewhere(model, objects.optimizers, objects.criterion))
        if is_lazy(model):
            model.__dict__[_TAKEN] = True
            if placeholders is None:
                recording = Recording(model, ReplaySource(model))
                recording.fill((), context.device)
                for optimizer in objects.optimizers:
                    rebind(optimizer, recording.replaced)
    return place_or_hollow(model, objects.optimizer, context) if placeholders == "device" else None


def hollow_objects(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    device: torch.device,
    policy: PrecisionPolicy,
) -> Recording:
    """Take the values of a model's parameters out of it, and bring what is left to a device, with the first rank's.

    Args:
        model: A lazy model, or one for which `shards_from_host` holds; its lazy tensors, or its parameters, become
            tensors of the device with one element of memory each, which a strategy may give other memory by
            ``.data = ...``.
        optimizer: Its optimizer, or several, which keep their hold on the parameters. State of a parameter's shape that
            is on the host stays there, for `HostedOptimizer.adopt` to cut.
        device: Where the model will run.
        policy: Precision to bring to what has values; see `place_model`.

    Returns:
        How the model's values are made, or where they are.

    Collective: every rank of the world, where the model has tensors with values.
    """
    optimizers = as_tuple(optimizer)
    states = [StateOnHost(each) for each in optimizers]
    for state in states:
        state.take()
    recording = take_recording(model, device)
    for each in optimizers:
        rebind(each, recording.replaced)
    hollow = recording.name_of
    place_model(model, optimizers, device, policy, hollow)
    for state in states:
        state.give_back(recording.replaced)
    send_first(each.data for each in (*model.parameters(), *model.buffers()) if id(each) not in hollow)
    return recording


def place_or_hollow(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, context: BoostContext
) -> Recording | None:
    """Bring a model to the run's device in its own formats, with the first rank's values on every rank.

    The values of a lazy model, and of one on the host, are left for when it is known what this rank keeps of them.

    Args:
        model: The user's model.
        optimizer: Its optimizer, or several.
        context: Device and ranks.

    Returns:
        How those values are made, or where they are, see `hollow_objects`; ``None`` where the model has its values.

    Raises:
        ConfigError: If ranks built different models.

    Collective: every rank of the world.
    """
    unchanged = replace(context.precision, param_dtype=None)
    if is_lazy(model) or shards_from_host(context):
        return hollow_objects(model, optimizer, context.device, unchanged)
    place_model(model, optimizer, context.device, unchanged)
    agree_on_values(model)
    return None


def compare_models(model: nn.Module, context: BoostContext, meeting: Together) -> None:
    """Compare how ranks have built their models, lazily or not, before anything is changed.

    After the meeting every rank replays the first one's draws, so that shards of different ranks are of the same
    tensors. Generators still end up, on each rank, where its own seed leads.

    Args:
        model: The user's model.
        context: Of the `boost`.
        meeting: Of all ranks. It raises `LazyInitError` where ranks have recorded different constructions, other
            constants and scalars too.

    Raises:
        LazyInitError: If the context of a lazy model is still open, or a file can't be read any more.
    """
    source = ReplaySource(model) if is_lazy(model) else None
    recorders = [] if source is None else source.recorders
    values = {} if source is None else source.fingerprints()
    seeds = [recorder.generators.seeds for recorder in recorders]
    built = values, [len(each) for each in seeds]
    coordinator = context.coordinator

    def take_seeds() -> None:
        first = coordinator.broadcast_object(seeds, name="boost", meets=False)
        for recorder, given in zip(recorders, first, strict=True):
            recorder.generators.take_seeds(given)

    meeting.compare(built, differs=lambda: _refuse_other_model(values, coordinator))
    meeting.compare(seeds, differs=take_seeds)
    compare_hosts(model, context, meeting)


def _refuse_other_model(values: Mapping[str, bytes], coordinator: DistCoordinator) -> None:
    """Raise on every rank in what models differ that are not the same on all ranks.

    Raises:
        LazyInitError: Always.

    Collective: every rank of the world.
    """
    first = coordinator.broadcast_object(values, name="boost", meets=False)
    others = [name for name in {**values, **first} if values.get(name) != first.get(name)]
    with coordinator.together("boost"):
        if others:
            msg = (
                f"Rank {coordinator.rank} built another model than rank 0: {len(others)} of {len(values)} tensors "
                f"would have other values, the first of them '{others[0]}', since modules, numbers, constants or files "
                "that their construction uses differ. Build the same model, seed `random`, NumPy and torch alike on "
                "every rank before, and read the same files."
            )
            raise LazyInitError(msg)
    msg = "Some ranks have seeded random generators more often than others while the model was built. Seed alike."
    raise LazyInitError(msg)
