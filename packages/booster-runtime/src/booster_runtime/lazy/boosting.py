"""What `Booster.boost` and plugins do with a lazy model before a strategy lays it out."""

from __future__ import annotations

from collections import Counter
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
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, Boosted
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator, Together
    from booster_runtime.lazy.holders import LazyHolder
    from booster_runtime.lazy.recorder import Recorder

_RUN_EAGERLY = "_booster_run_eagerly"
"""Attribute of a model that was lazy: how often each operation that can't be recorded was run instead."""


def check_not_taken(model: object) -> None:
    """Raise if a model was lazy and a `boost` that raised has taken its values: they may be anywhere or lost.

    Raises:
        ConfigError: If so.
    """
    if _RUN_EAGERLY in getattr(model, "__dict__", {}):
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
        elsewhere = find_elsewhere(model, objects.optimizers, objects.criterion)
        if is_lazy(model):
            model.__dict__[_RUN_EAGERLY] = sum((each.run_eagerly for each in ReplaySource(model).recorders), Counter())
        if placeholders is not None:
            # First, so that a strategy finds optimizer state with values.
            fill_elsewhere(elsewhere)
        else:
            materialize_objects(model, objects.optimizers, context.device, elsewhere)
    return place_or_hollow(model, objects.optimizer, context) if placeholders == "device" else None


def describe_lazy(models: Iterable[nn.Module]) -> list[str]:
    """Return a line that says which operations of construction could not be recorded, if any."""
    total: Counter[str] = Counter()
    for model in models:
        total.update(model.__dict__.get(_RUN_EAGERLY, {}))
    if not total:
        return []
    counted = ", ".join(f"{name} ({count})" for name, count in sorted(total.items()))
    return [f"lazy init  run instead of recorded: {counted}"]


def materialize_objects(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    device: torch.device,
    elsewhere: Sequence[LazyHolder] = (),
) -> None:
    """Give a lazy model its values on a device, whole, and keep its optimizer's hold on the parameters.

    Args:
        model: The model.
        optimizer: Its optimizer, or several.
        device: Where parameters and buffers go.
        elsewhere: Lazy tensors that are not its own.
    """
    recording = Recording(model, ReplaySource(model, elsewhere))
    recording.fill((), device)
    for each in as_tuple(optimizer):
        rebind(each, recording.replaced)


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
        optimizer: Its optimizer, or several; see `hollow_objects` for what becomes of their state.
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
    recorded = [_recorded(recorder) for recorder in recorders]
    values = {} if source is None else source.fingerprints()
    seeds = [recorder.generators.seeds for recorder in recorders]
    coordinator = context.coordinator

    def take_seeds() -> None:
        first = coordinator.broadcast_object(seeds, name="boost", meets=False)
        for recorder, given in zip(recorders, first, strict=True):
            recorder.generators.take_seeds(given)

    meeting.compare([recorded, values], differs=lambda: _refuse_other_model(recorded, values, coordinator))
    meeting.compare(seeds, differs=take_seeds)
    compare_hosts(model, context, meeting)


def _refuse_other_model(
    recorded: Sequence[tuple[list[str], dict[str, int]]], values: Mapping[str, bytes], coordinator: DistCoordinator
) -> None:
    """Raise on every rank in what models differ that are not the same on all ranks.

    Raises:
        LazyInitError: Always.

    Collective: every rank of the world.
    """
    first, first_values = coordinator.broadcast_object((recorded, values), name="boost", meets=False)
    head = f"Rank {coordinator.rank} built another model than rank 0: "
    with coordinator.together("boost"):
        if first != recorded:
            here, there = (sum(count for _, counts in each for count in counts.values()) for each in (recorded, first))
            msg = (
                f"{head}{here} operations were recorded, there {there}. "
                "Every rank must build the same model, lazily or not."
            )
            raise LazyInitError(msg)
        if values != first_values:
            others = [name for name in {**values, **first_values} if values.get(name) != first_values.get(name)]
            msg = (
                f"{head}{len(others)} of {len(values)} tensors would have other values, the first of them "
                f"'{others[0]}', since numbers, constants or files that their construction uses differ. Seed `random`, "
                "NumPy and torch alike on every rank before the model is built, and read the same files."
            )
            raise LazyInitError(msg)


def _recorded(recorder: Recorder) -> tuple[list[str], dict[str, int]]:
    """Return the draws of a recording in their order, and how often each operation occurs in it.

    What draws nothing has no order that ranks share: libraries let threads read files.
    """
    draws = [entry.name for entry in recorder.entries if entry.draw is not None]
    return draws, dict(Counter(entry.name for entry in recorder.entries))
