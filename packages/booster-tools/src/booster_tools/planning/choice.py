"""`choose_plugin`: the installed plugin whose training steps are fastest among those that fit into a budget.

Rank 0 plans a step of a copy without values under each setting, while the others wait, and tells them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import Boosted
from booster_core.precision import PrecisionPolicy
from booster_core.ranks import ensure_process_group
from booster_runtime.lazy import is_lazy
from booster_tools.planning.candidates import Candidate, candidates, check_plannable
from booster_tools.planning.meta_executor import SMALL_NUMEL
from booster_tools.planning.ranking import Devices, Planned, planned, size_text
from booster_tools.planning.simulate import TrainingStep, simulate
from booster_tools.rehearsal import checked_objects, copied, copied_loader, first_of, random_state_kept
from booster_tools.verification.losses import explaining, guessed_losses, has_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from booster_core.plugin import Plugin
    from booster_core.ranks import DistCoordinator

_ALIKE = 1.01
"""Of settings whose estimated times differ by less, the one that needs least memory is taken."""
_INSTEAD = "Or choose a plugin by `booster plan`, and name it"
_LOSS = (
    "Pass a criterion that is called as `criterion(outputs, batch)`, or as `criterion(model(inputs), targets)` where "
    f"batches are pairs. {_INSTEAD}."
)


def choose_plugin(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Any] | None = None,
    dataloader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    memory_budget_bytes: int,
    mixed_precision: PrecisionPolicy | str | None = None,
    device: torch.device | str | None = None,
) -> Plugin:
    """Return the fastest installed plugin whose training steps fit into a budget, the same on every rank.

    Call it before ``Booster(device, mixed_precision, plugin)``, which takes what it returns. Rank 0 plans a step on
    the data loader's first batch under each setting, and prints what it chose. Nothing of the objects changes, nor the
    random state. Settings with a pipeline or with offloading are left out: their training loop or their speed is
    another. A group of one is started where nothing was launched.

    Args:
        model: As for `Booster.boost`, as are the next three; it may be lazy.
        optimizer: Over parameters of the model.
        criterion: Computes the loss as ``criterion(model(inputs), targets)`` where batches are pairs, else as
            ``criterion(outputs, batch)``; ``None`` takes the loss that the model's outputs have.
        dataloader: Its first batch is read from a copy of the loader; of several loaders the first is taken.
        memory_budget_bytes: What a rank may hold at the peak of a step, in bytes; the same on every rank.
        mixed_precision: As for `Booster`.
        device: As for `Booster`.

    Raises:
        TypeError: If an argument is of another type.
        ConfigError: If the budget is no positive number of bytes or differs between ranks, `boost` would refuse the
            objects, the optimizer or the loader is missing, a training step can't be planned, none fits, or a launcher
            started several processes and the run is not launched.

    Collective: every rank of the world.
    """
    coordinator = ensure_process_group()
    found: Planned | None = None
    with coordinator.together("choose_plugin"):
        _check_budget(memory_budget_bytes)
        objects = checked_objects(Boosted(model, optimizer, criterion), dataloader, what="`choose_plugin`")
        policy = None if mixed_precision is None else PrecisionPolicy.parse(mixed_precision)
        on_host = Booster(device).device.type == "cpu"
    coordinator.agree("choose_plugin", {"memory_budget_bytes": memory_budget_bytes})
    with coordinator.together("choose_plugin"):
        if coordinator.rank == 0:
            devices = Devices(number=coordinator.world_size, memory_bytes=memory_budget_bytes)
            found = _best(objects, devices, policy, on_host=on_host)
    return _made_on_all(found, coordinator)


def _check_budget(budget: Any) -> None:
    """Raise where a budget is no number of bytes.

    Raises:
        ConfigError: Naming it.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        msg = (
            f"`memory_budget_bytes={budget!r}` is no positive number of bytes. Pass what a rank may hold at the "
            "peak of a training step, such as `memory_budget_bytes=60 * 2**30`."
        )
        raise ConfigError(msg)


def _made_on_all(found: Planned | None, coordinator: DistCoordinator) -> Plugin:
    """Make the plugin that rank 0 found on every rank, and print it on rank 0.

    Raises:
        PluginError: If a rank can't load it.
        ConfigError: If it refuses its options.

    Collective: every rank of the world.
    """
    chosen = None if found is None else (found.candidate.name, dict(found.candidate.options))
    name, options = coordinator.broadcast_object(chosen, name="choose_plugin")
    with coordinator.together("choose_plugin"):
        plugin = Candidate(name=name, options=options).make()
    if found is not None and found.prediction is not None:
        peak, budget = found.prediction.peak_bytes, found.devices.memory_bytes
        coordinator.print_on_master(
            f"choose_plugin chose {found.candidate}: {size_text(peak)} of {size_text(budget)} at the peak of a step."
        )
    return plugin


def _best(objects: Boosted, devices: Devices, policy: PrecisionPolicy | None, *, on_host: bool) -> Planned:
    """Return the fastest setting that fits.

    Raises:
        ConfigError: If a training step can't be planned, or none fits.
    """
    model, optimizer = objects.model, objects.optimizer
    assert optimizer is not None, "checked before"
    with random_state_kept(torch.device("cpu")):
        loader = copied_loader(objects.dataloader, what="`choose_plugin`", instead=f"{_INSTEAD}.")
        batch = first_of(loader, what="`choose_plugin`")
    values = _without_values(model, optimizer)
    forward = explaining(guessed_losses(objects.criterion, batch).forward, "`choose_plugin`", _LOSS)
    training = TrainingStep(
        build=lambda: copied(model, optimizer, values(), what="`choose_plugin`", instead=_INSTEAD),
        share=lambda *_: batch,
        loss=lambda model, share: forward(model, share)[0],
        mixed_precision=policy,
        on_host=on_host,
    )

    def simulated(plugin: Plugin) -> Any:
        check_plannable(plugin)
        if has_stages(plugin):
            msg = "Loops over a pipeline differ from others, so that it has to be named."
            raise ConfigError(msg)
        return simulate(training, plugin, devices.number)

    found = [planned(each, devices, simulated) for each in candidates(devices.number)]
    fitting = [
        (_seconds_per_share(each), each.prediction.peak_bytes, each) for each in found if each.prediction and each.fits
    ]
    if not fitting:
        raise _nothing_fits(found, devices.memory_bytes)
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
            "`choose_plugin` could plan no training step of this model under any installed plugin: "
            f"{listed or 'none is installed.'} Name a plugin instead."
        )
    peak, nearest = min(sizes, key=lambda each: each[0])
    return ConfigError(
        f"No installed plugin trains this model within `memory_budget_bytes={budget}` ({size_text(budget)}). "
        f"Nearest is {nearest.candidate}, with {size_text(peak)} at the peak of a step. Use more ranks, smaller "
        "batches, activation checkpointing, or a plugin that offloads or has a pipeline, which has to be named."
    )


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
