"""`UnevenBatches`: iterate over batches of which ranks have different numbers, until the last rank has run out.

Ranks that have run out take part in every step with their last batch and a weight of 0, so that the strategies'
collectives meet. The idea is that of ``torch.distributed.algorithms.Join``, which shadows the collectives of DDP; here
steps are whole, so that it works under every plugin, and the mean is over the ranks that still have batches.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import hookimpl, register_hooks, unregister_hooks
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer
    from typing_extensions import Self

    from booster_core.ranks import DistCoordinator


class UnevenBatches:
    """An iterator over this rank's batches that ends on all ranks together.

    Args:
        batches: This rank's batches.
        size: Number of ranks that see different samples.
        coordinator: Of the run.
        device: Where ranks exchange how far they are.
    """

    def __init__(
        self, batches: Iterable[Any], *, size: int, coordinator: DistCoordinator, device: torch.device
    ) -> None:
        self._batches, self._size = batches, size
        self._coordinator, self._device = coordinator, device
        self._source: Iterator[Any] | None = None
        self._batch: Any = None
        self._has_begun = self._has_ended = False
        self._weight = 1.0
        self._is_weighed = False
        self._is_pipelined = False  # the criterion is weighted, which most stages don't call
        self._stepped: set[int] = set()
        self._hooks = _Steps(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch, or the last one again.

        Raises:
            ConfigError: If a rank has no batch at all and others do.
            Exception: What any rank's batches raised.

        Collective: every rank of the world.
        """
        if self._has_ended:
            raise StopIteration
        error: Exception | None = None
        is_own = False
        try:
            self._source = iter(self._batches) if self._source is None else self._source
            self._batch, is_own = next(self._source), True
        except StopIteration:
            pass
        except Exception as caught:  # noqa: BLE001 - carried to every rank below
            error = caught
        is_empty = error is None and not is_own and not self._has_begun
        flags = torch.tensor([is_own, error is not None, is_empty], device=self._device, dtype=torch.int64)
        if self._coordinator.world_size > 1:
            collectives.all_reduce(flags, dist.ReduceOp.SUM).wait()
        num_own, num_failed, num_empty = flags.tolist()
        if num_own and is_empty:
            error = ConfigError(
                "This rank has no batch at all, so that it can't take part in the others' steps. `Booster.join` needs "
                "at least one batch on every rank."
            )
        if num_failed or (num_own and num_empty):
            self._end()
            with self._coordinator.together("join"):
                if error is not None:
                    raise error
        if not num_own:
            self._end()
            raise StopIteration
        if not self._has_begun:
            register_hooks(self._hooks)
            self._has_begun = True
        num_active = num_own * self._size // self._coordinator.world_size  # replicas have equally many ranks
        self._weight = self._size / num_active if is_own else 0.0
        self._is_weighed = False
        self._stepped.clear()
        return self._batch

    def weigh(self, loss: Any) -> Any:
        """Return the loss of the present batch, weighted so that the mean over ranks is that of ranks with batches.

        Collective: none.
        """
        self._is_weighed = True
        return loss * self._weight if self._weight != 1 and isinstance(loss, torch.Tensor) else loss

    def weighing(self, criterion: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """Return a criterion whose losses are weighted.

        Collective: none.
        """
        self._is_pipelined = True

        def weighted(outputs: Any, batch: Any) -> Tensor:
            loss: Tensor = self.weigh(criterion(outputs, batch))
            return loss

        return weighted

    def check_step(self, optimizer: Optimizer) -> None:
        """Check that an optimizer's step followed weighted gradients; where one rank raises, all do.

        Raises:
            ConfigError: If gradients were not weighted, or belong to no batch that was handed out.

        Collective: none.
        """
        if self._weight == 1:  # on every rank, or on none
            return
        if not (self._is_weighed or self._is_pipelined):
            msg = (
                "`Booster.join` weighs losses in `booster.backward(loss, optimizer)`, and an optimizer has stepped "
                "without it after some ranks had run out of batches. Call it in place of `loss.backward()`."
            )
            raise ConfigError(msg)
        if id(optimizer) in self._stepped:
            msg = (
                "An optimizer has stepped twice on one batch of `Booster.join` after some ranks had run out of theirs, "
                "as it would where the loop was left and training goes on. Delete the iterator that `join` returned."
            )
            raise ConfigError(msg)
        self._stepped.add(id(optimizer))

    def _end(self) -> None:
        if self._has_begun:
            unregister_hooks(self._hooks)
        self._weight, self._has_ended, self._batch, self._source = 1.0, True, None, None


class _Steps:
    """Hooks that show optimizer steps to joined batches for as long as somebody holds these."""

    def __init__(self, batches: UnevenBatches) -> None:
        self._batches = weakref.ref(batches)

    @hookimpl
    def after_step(self, optimizer: Optimizer) -> None:
        """Check a step."""
        batches = self._batches()
        if batches is None:
            unregister_hooks(self)
        else:
            batches.check_step(optimizer)
