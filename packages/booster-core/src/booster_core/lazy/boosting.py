"""What `Booster.boost` does with a lazy model before its plugin configures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import LazyInitError
from booster_core.lazy.model import Recording, is_lazy
from booster_core.replicated import rebind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.coordinator import DistCoordinator
    from booster_core.lazy.recorder import Recorder


def materialize_objects(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Give a lazy model its values on a device, whole, and keep its optimizer's hold on the parameters.

    Collective: none.
    """
    recording = Recording(model)
    recording.fill((), device)
    if optimizer is not None:
        rebind(optimizer, recording.replaced)


def agree_on_seeds(model: nn.Module, coordinator: DistCoordinator) -> None:
    """Let every rank replay the first rank's draws, so that shards of different ranks are of the same tensors.

    Generators still end up, on each rank, where its own seed leads.

    Raises:
        LazyInitError: If ranks have recorded different constructions.

    Collective: every rank of the world, whether or not its model is lazy.
    """
    recorders = _recorders(model)
    own = [[entry.name for entry in recorder.entries] for recorder in recorders]
    names, seeds = coordinator.broadcast_object((own, [recorder.seeds for recorder in recorders]))
    error = None
    if names != own:
        error = LazyInitError(
            f"Rank {coordinator.rank} built another model than rank 0: {sum(map(len, own))} operations were recorded, "
            f"there {sum(map(len, names))}. Every rank must build the same model, lazily or not."
        )
    coordinator.raise_together(error)
    _take_seeds(recorders, seeds)


def _recorders(model: nn.Module) -> list[Recorder]:
    return Recording(model).recorders if is_lazy(model) else []


def _take_seeds(recorders: list[Recorder], seeds: list[list[Tensor]]) -> None:
    for recorder, given in zip(recorders, seeds, strict=True):
        recorder.take_seeds(given)
