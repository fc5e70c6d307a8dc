"""The methods of `Booster` that run whole batches, the same under every plugin; booster-runtime does the work."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.errors import ConfigError, needs_runtime
from booster_core.plugin.wrappers import ModelWrapper, boosted_inside
from booster_core.saving import Saving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Evaluation(NamedTuple):
    """What `Booster.evaluate_batch` computes.

    Attributes:
        loss: The mean loss of all ranks' batches, a scalar tensor, the same on every rank.
        outputs: What the model returned for this rank's batch; ``None`` on ranks without a pipeline's last stage.
        weight: Total weight of the loss over all ranks, the same on every rank: the mean over a data set is the sum of
            ``loss * weight`` divided by the sum of ``weight``.
    """

    loss: Tensor
    outputs: Any
    weight: float


class Batches(Saving):
    """Trains and evaluates on whole batches."""

    # The batches that `join` handed out last; nobody else keeps them where a loop over them is left.
    _joined_batches: weakref.ref[Any] | None = None

    def train_batch(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor] | None,
        optimizer: Optimizer,
        *,
        accumulation: int = 1,
        max_norm: float | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
    ) -> Tensor:
        """Take one optimizer step on the next batches: forward, backward, clip, step, ``zero_grad``.

        Works under every plugin, with a pipeline or without. Batches are moved to the device. A mapping becomes keyword
        arguments of the model, a list or tuple positional ones; entries that its forward does not take are left to the
        criterion.

        Args:
            data_iter: Yields batches, such as ``iter(dataloader)``.
            model: The boosted model.
            criterion: Called as ``criterion(outputs, batch)``, returns a mean; ``None`` takes the loss that the model's
                outputs have, as those of transformers do.
            optimizer: The boosted optimizer.
            accumulation: Number of batches to take for the step; fewer where no more are left.
            max_norm: Clip gradients to this global norm.
            weight: Counts what the criterion is a mean of in a batch or a part of one, such as labels that are not
                -100: ``weight(batch)``. Then all batches and ranks together give the gradients of one large batch. By
                default, all batches weigh the same.

        Returns:
            The mean loss over all ranks and batches, a scalar tensor, the same on every rank.

        Raises:
            StopIteration: If no batch is left.
            TypeError: If the optimizer is not a boosted one, or ``data_iter`` no iterator.
            ConfigError: If ``accumulation`` is no positive integer, weights sum up to 0, it can't be told which entries
                of a tuple are for the model, or booster-runtime is not installed.

        Collective: every rank of the world.
        """
        loss: Tensor = self._hook("train_batch")(
            booster=self,
            data_iter=data_iter,
            model=self._the_model(model, "train_batch"),
            criterion=criterion,
            optimizer=optimizer,
            accumulation=accumulation,
            max_norm=max_norm,
            weight=weight,
        )
        return loss

    def evaluate_batch(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor] | None,
        *,
        weight: Callable[[Any], float | Tensor] | None = None,
    ) -> Evaluation:
        """Compute loss and outputs of the next batch, in evaluation mode and without gradients.

        Args:
            data_iter: As for `train_batch`, as are the others.
            model: The boosted model; its mode is restored.
            criterion: As for `train_batch`.
            weight: As for `train_batch`.

        Returns:
            The loss over all ranks, this rank's outputs, and the weight of the loss.

        Raises:
            StopIteration: If no batch is left.
            ConfigError: As for `train_batch`.

        Collective: every rank of the world.
        """
        evaluation: Evaluation = self._hook("evaluate_batch")(
            booster=self,
            data_iter=data_iter,
            model=self._the_model(model, "evaluate_batch"),
            criterion=criterion,
            weight=weight,
        )
        return evaluation

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
        joined: Iterator[Any] = self._hook("join_batches")(booster=self, batches=batches)
        self._joined_batches = weakref.ref(joined)
        return joined

    def _joined(self) -> Any:
        """Return the batches that are being joined, which weigh losses; ``None`` where there are none."""
        return None if self._joined_batches is None else self._joined_batches()

    def _hook(self, name: str, what: str = "Batches are run") -> Any:
        hook = getattr(self.context.hooks, name)
        if not hook.get_hookimpls():
            raise ConfigError(needs_runtime(what))
        return hook

    def _the_model(self, model: nn.Module | None, call: str) -> nn.Module:
        """Return the boosted model that was passed to a call, or the only one there is."""
        if model is None:
            if len(self._optimizers) != 1:
                msg = f"`Booster.{call}` needs to be told which model: {len(self._optimizers)} models are boosted."
                raise ConfigError(msg)
            return next(iter(self._optimizers))
        model = boosted_inside(model)
        if not isinstance(model, ModelWrapper) or model not in self._optimizers:
            got = f"{type(model).__module__}.{type(model).__qualname__}"
            msg = f"`Booster.{call}` needs the model returned by `Booster.boost`; got `{got}`."
            raise TypeError(msg)
        return model
