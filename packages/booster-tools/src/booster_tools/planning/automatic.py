"""``Booster(plugin="auto")``: the installed plugin whose training steps are fastest among those that fit into a budget.

`boost` knows the model, so it chooses: rank 0 plans a step of a copy without values under each setting, while the
others wait, and tells them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.plugin import SYNCHRONOUS_TRAINING, Capability, Plugin
from booster_runtime.lazy import is_lazy
from booster_tools.planning.answers import SMALL_NUMEL
from booster_tools.planning.candidates import Candidate, candidates
from booster_tools.planning.prediction import Training, predict_training
from booster_tools.planning.ranking import Devices, Planned, planned, size_text
from booster_tools.verification.first_batches import copy_of
from booster_tools.verification.losses import guessed_losses, has_stages
from booster_tools.verification.objects import copied
from booster_tools.verification.run import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from booster_core import Booster
    from booster_core.plugin import BoostContext, Boosted
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter

_ALIKE = 1.01
"""Of settings whose estimated times differ by less, the one that needs least memory is taken."""
_INSTEAD = "Or choose a plugin by `booster plan`, and name it"


class AutoPlugin(Plugin):
    """Stands for the plugin that `boost` will choose.

    Args:
        memory_budget_bytes: What a rank may hold at the peak of a step.

    Raises:
        ConfigError: If the budget is missing or not positive.
    """

    name: ClassVar[str] = "auto"
    api_version: ClassVar[int] = 1
    capabilities: ClassVar[frozenset[Capability]] = SYNCHRONOUS_TRAINING | {Capability.DATA_PARALLEL}

    def __init__(self, memory_budget_bytes: int | None) -> None:
        if memory_budget_bytes is None or memory_budget_bytes < 1:
            msg = (
                f"`plugin='auto'` with `memory_budget_bytes={memory_budget_bytes}` can't tell what fits. Pass the "
                "bytes that a rank may hold at the peak of a step, such as `memory_budget_bytes=60 * 2**30`."
            )
            raise ConfigError(msg)
        self.memory_budget_bytes = memory_budget_bytes

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Refuse: another plugin has taken this one's place in `boost`."""
        del objects, context
        raise ConfigError(_too_early("The objects are configured"))

    def data_parallel_coordinates(self, coordinator: DistCoordinator) -> tuple[int, int]:
        """Refuse: which ranks see different samples is not known."""
        del coordinator
        raise ConfigError(_too_early("Samples are shared out (pass `boost` a plain data loader)"))

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None, context: BoostContext) -> StateAdapter:
        """Refuse: where state will be is not known."""
        del model, optimizer, context
        raise ConfigError(_too_early("`booster.checkpoint_io` is used"))


def _too_early(what: str) -> str:
    return f"{what} by the plugin that `plugin='auto'` chooses, and it was asked for before. Call `boost`."


def auto_plugin(booster: Booster, plugin: Any, memory_budget_bytes: int | None) -> AutoPlugin:
    """Return what stands for the chosen plugin until `boost`; see `Booster`.

    Raises:
        ConfigError: If the budget is missing or not positive, or another plugin is named.

    Collective: none.
    """
    del booster
    if plugin != "auto":
        msg = (
            f"`memory_budget_bytes={memory_budget_bytes}` is what `plugin='auto'` chooses by, and the plugin is "
            f"{plugin!r}. Leave it out, or pass `plugin='auto'`."
        )
        raise ConfigError(msg)
    return AutoPlugin(memory_budget_bytes)


def choose_plugin(booster: Booster, objects: Boosted) -> Plugin:
    """Return the plugin for a model, the same on every rank, and print it on rank 0.

    Args:
        booster: Whose plugin stands for the one to choose.
        objects: What the user passed to `boost`, checked; nothing of it changes.

    Raises:
        ConfigError: If a training step can't be planned, or none fits.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    error: Exception | None = None
    found: Planned | None = None
    if coordinator.rank == 0:
        try:
            found = _best(booster, objects)
        except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
            error = caught
    coordinator.raise_together(error, name="boost")
    chosen = None if found is None else (found.candidate.name, dict(found.candidate.options))
    name, options = coordinator.broadcast_object(chosen, name="boost")
    plugin = None
    try:
        plugin = Candidate(name=name, options=options).make()
    except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
        error = caught
    coordinator.raise_together(error, name="boost")
    assert plugin is not None, "made, or an error raised"
    if found is not None and found.prediction is not None:
        peak, budget = found.prediction.peak_bytes, found.devices.memory_bytes
        coordinator.print_on_master(
            f"plugin='auto' chose {found.candidate}: {size_text(peak)} of {size_text(budget)} at the peak of a step."
        )
    return plugin


def _best(booster: Booster, objects: Boosted) -> Planned:
    """Return the fastest setting that fits."""
    assert isinstance(booster.plugin, AutoPlugin), "`boost` chooses once"
    budget, size = booster.plugin.memory_budget_bytes, booster.context.coordinator.world_size
    model, optimizer = objects.model, objects.optimizer
    if optimizer is None or objects.dataloader is None:
        missing = "optimizer" if optimizer is None else "data loader"
        msg = (
            "`plugin='auto'` plans a training step on the data loader's first batch, and `boost` got no "
            f"{missing}. Pass it. {_INSTEAD}."
        )
        raise ConfigError(msg)
    with random_state_kept():
        batch = _first_batch(objects.dataloader)
    values = _without_values(model, optimizer)
    training = Training(
        build=lambda: copied(model, optimizer, values(), what="`plugin='auto'`", instead=_INSTEAD),
        share=lambda *_: batch,
        loss=_explained(guessed_losses(objects.criterion, batch).forward),
        mixed_precision=booster.precision,
        on_host=booster.context.device.type == "cpu",
    )
    devices = Devices(number=size, memory_bytes=budget)

    def predict(plugin: Plugin) -> Any:
        if has_stages(plugin):
            msg = "Loops over a pipeline differ from others, so that it has to be named."
            raise ConfigError(msg)
        return predict_training(training, plugin, size)

    found = [planned(each, devices, predict) for each in candidates(size)]
    fitting = [
        (_seconds_per_share(each), each.prediction.peak_bytes, each) for each in found if each.prediction and each.fits
    ]
    if not fitting:
        raise _nothing_fits(found, budget)
    fastest = min(seconds for seconds, _, _ in fitting)
    alike = [(peak, each) for seconds, peak, each in fitting if seconds <= _ALIKE * fastest]
    return min(alike, key=lambda each: each[0])[1]


def _seconds_per_share(found: Planned) -> float:
    """Return the estimated time by data parallel rank: the loader's batch size counts samples of each of these."""
    assert found.prediction is not None, "it fits"
    return found.step_seconds / found.prediction.data_parallel_size


def _nothing_fits(found: list[Planned], budget: int) -> ConfigError:
    sizes = [(each.prediction.peak_bytes, each) for each in found if each.prediction is not None]
    if not sizes:
        reasons = dict.fromkeys(str(each.problem) for each in found)
        listed = " ".join(f"({index + 1}) {reason}" for index, reason in enumerate(reasons))
        return ConfigError(
            "`plugin='auto'` could plan no training step of this model under any installed plugin: "
            f"{listed or 'none is installed.'} Name a plugin instead."
        )
    peak, nearest = min(sizes, key=lambda each: each[0])
    return ConfigError(
        f"No installed plugin trains this model within `memory_budget_bytes={budget}` ({size_text(budget)}). "
        f"Nearest is {nearest.candidate}, with {size_text(peak)} at the peak of a step. Use more ranks, smaller "
        "batches, activation checkpointing, or a plugin that offloads or has a pipeline, which has to be named."
    )


def _first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first batch of a copy of a loader, whose batch size counts samples of a data parallel rank."""
    for batch in copy_of(loader, what="`plugin='auto'`", instead=f"{_INSTEAD}."):
        return batch
    msg = "`plugin='auto'` plans a training step on the data loader's first batch, and the loader has none."
    raise ConfigError(msg)


def _without_values(model: nn.Module, optimizer: Optimizer) -> Callable[[], dict[int, Any]]:
    """Return a function that makes stand-ins for all tensors of a model and its optimizer, by ``id``.

    They are on the CPU, and only small ones of models that are not lazy have values.
    """
    keeps_values = not is_lazy(model)
    state = [leaf for each in optimizer.state.values() for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)]

    def stand_in(tensor: Tensor) -> Tensor:
        if keeps_values and tensor.numel() <= SMALL_NUMEL:
            made = tensor.detach().cpu().clone()
        else:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.numel() <= SMALL_NUMEL:
                made.zero_()
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def make() -> dict[int, Any]:
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers(), *state)}
        return {key: stand_in(each) for key, each in tensors.items()}

    return make


def _explained(forward: Callable[[nn.Module, Any], tuple[Tensor, Any]]) -> Callable[[nn.Module, Any], Tensor]:
    """Return what computes a loss, and says what to do where that fails."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        try:
            found, _ = forward(model, batch)
        except Exception as error:
            msg = (
                "The loss could not be computed from the data loader's first batch "
                f"({type(error).__name__}: {error}). Pass `boost` a criterion that is called as "
                "`criterion(outputs, batch)`, or as `criterion(model(inputs), targets)` where batches are pairs. "
                f"{_INSTEAD}."
            )
            raise ConfigError(msg) from error
        return found

    return loss
