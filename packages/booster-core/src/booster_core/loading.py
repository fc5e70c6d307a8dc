"""The methods of `Booster` that concern batches: loaders, uneven numbers of batches, and values per sample."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError, needs_runtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.utils.data import DataLoader, Dataset

    from booster_core.plugin.interface import BoostContext, Plugin


class Loading(ABC):
    """Deals batches to ranks."""

    plugin: Plugin
    # The batches that `join` handed out last; nobody else keeps them where a loop over them is left.
    _joined_batches: weakref.ref[Any] | None = None

    @property
    @abstractmethod
    def context(self) -> BoostContext:
        """Device, ranks, precision and hooks of this run."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model runs."""

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int = 1, **kwargs: Any) -> DataLoader[Any]:
        """Return a data loader over this rank's samples; see `Plugin.prepare_dataloader` for the arguments.

        Collective: none.
        """
        return self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)

    def gather_for_metrics(self, values: Any, dataloader: DataLoader[Any]) -> Any:
        """Return values of every rank's last batch, each sample once, in the order of the data set.

        Ranks get equally many batches, so samples at an epoch's end are repeated on some of them; those are left out.
        Values are sent through the host: reduce them to what the metric needs, such as predictions instead of logits.

        Args:
            values: Tensors in any nest of dicts, lists and tuples, each with one value per sample of this rank's batch
                along its first dimension; ``None`` on a rank that has none, such as a pipeline's first stage.
            dataloader: The loader that the batch came from, as `boost` or `prepare_dataloader` returned it.

        Returns:
            The same nest of tensors on this run's device, the same on every rank.

        Raises:
            TypeError: If the loader is another one, or a value is no tensor.
            ConfigError: If a tensor has not one value per sample, or ranks' tensors don't fit together.

        Collective: every rank of the world, after each batch.
        """
        hooks, coordinator = self.context.hooks, self.context.coordinator
        if not hooks.gather_samples.get_hookimpls():
            raise ConfigError(needs_runtime("Values are gathered"))
        index, _ = self.plugin.data_parallel_coordinates(coordinator)
        return hooks.gather_samples(
            values=values, loader=dataloader, index=index, coordinator=coordinator, device=self.device
        )

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator that ends on all ranks together, where some have fewer batches of their own than others.

        Loaders that `boost` or `prepare_dataloader` returned have equally many batches on every rank and don't need it.
        A rank that has run out gets its last batch again. `backward` and `execute_pipeline` count that as nothing:
        a step follows the mean loss of the ranks that still have batches. Each batch costs a collective call.

        Args:
            batches: This rank's batches.

        Raises:
            ConfigError: While iterating, if a rank has no batch at all and others do, or an optimizer steps at the end
                after a backward that was not `Booster.backward`.

        Collective: every rank of the world, at each batch.
        """
        hook = self.context.hooks.join_batches
        if not hook.get_hookimpls():
            raise ConfigError(needs_runtime("Batches are joined"))
        joined: Iterator[Any] = hook(
            batches=batches, plugin=self.plugin, coordinator=self.context.coordinator, device=self.device
        )
        self._joined_batches = weakref.ref(joined)
        return joined

    def _joined(self) -> Any:
        """Return the batches that are being joined, which weigh losses; ``None`` where there are none."""
        return None if self._joined_batches is None else self._joined_batches()

    def _deal(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Split a user's loader between data parallel ranks; one rank without booster-runtime keeps it."""
        coordinator = self.context.coordinator
        dealt: DataLoader[Any] | None = self.context.hooks.deal_dataloader(
            loader=loader, plugin=self.plugin, coordinator=coordinator
        )
        if dealt is None and self.plugin.data_parallel_coordinates(coordinator)[1] > 1:
            raise ConfigError(needs_runtime("Data loaders are split between ranks"))
        return loader if dealt is None else dealt
