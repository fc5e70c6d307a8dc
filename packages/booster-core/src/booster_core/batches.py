"""The methods of `Booster` that take whole batches, the same under every plugin; booster-runtime does the work."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.errors import ConfigError, needs_runtime
from booster_core.plugin.hooks import hook_relay
from booster_core.plugin.wrappers import ModelWrapper, boosted_inside
from booster_core.saving import Saving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


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
            The mean loss over all ranks and batches, a scalar tensor, the same on every rank; in fp64 where the losses
            are, else in fp32.

        Raises:
            StopIteration: If no batch is left.
            TypeError: If the optimizer is not a boosted one, or ``data_iter`` no iterator.
            ConfigError: If ``accumulation`` is no positive integer, weights sum up to 0, it can't be told which entries
                of a tuple are for the model, a block of `accumulate` with several micro-batches is active, or
                booster-runtime is not installed.

        Collective: every rank of the world.
        """
        loss: Tensor = self._run(
            "train_batch",
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
            model: The boosted model; the mode of each of its modules is restored.
            criterion: As for `train_batch`.
            weight: As for `train_batch`.

        Returns:
            The loss over all ranks, this rank's outputs, and the weight of the loss.

        Raises:
            StopIteration: If no batch is left.
            ConfigError: As for `train_batch`.

        Collective: every rank of the world.
        """
        evaluation: Evaluation = self._run(
            "evaluate_batch",
            data_iter=data_iter,
            model=self._the_model(model, "evaluate_batch"),
            criterion=criterion,
            weight=weight,
        )
        return evaluation

    def accumulate(
        self,
        model: nn.Module | None = None,
        steps: int | None = None,
        dataloader: DataLoader[Any] | None = None,
    ) -> AbstractContextManager[bool]:
        """Return a context for forward and backward of one micro-batch, whose value says whether a step comes next.

        `backward` divides the loss by the number of micro-batches of the step. Stepping before the last one raises.

        Args:
            model: The boosted model; may be left out when one model is boosted.
            steps: Number of micro-batches of a step.
            dataloader: The boosted loader: its last batches of an epoch are a step of their own, if fewer are left.

        Raises:
            ConfigError: If ``steps`` is no positive integer, or the number of batches of the loader is not known.

        Collective: as `no_sync`.
        """
        boosted = self._the_model(model, "accumulate")
        context: AbstractContextManager[bool] = self._run(
            "accumulate",
            model=boosted,
            optimizer=self._optimizers.get(boosted),
            steps=steps,
            dataloader=dataloader,
        )
        return context

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
        joined: Iterator[Any] = self._run("join", batches=batches)
        self._joined_batches = weakref.ref(joined)
        return joined

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
        return self._run("gather_for_metrics", values=values, loader=dataloader)

    def reduce(self, values: Any, reduction: str = "mean") -> Any:
        """Return the mean or sum of values over the ranks that see different samples, each of these counted once.

        Args:
            values: Tensors and numbers in any nest of dicts, lists and tuples; they are sent through the host. ``None``
                on a rank that has none, such as a pipeline's first stage.
            reduction: ``"mean"`` or ``"sum"``.

        Returns:
            The same nest of tensors on this run's device, the same on every rank.

        Raises:
            TypeError: If a value is neither a tensor nor a number.
            ConfigError: If the reduction is another one, or ranks' values don't fit together.

        Collective: every rank of the world.
        """
        return self._run("reduce", values=values, reduction=reduction)

    def to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors, in any nest of dicts, lists and tuples, on this run's device.

        Copies from pinned memory don't block. Collective: none.
        """
        return self._run("to_device", batch=batch)

    def _joined(self) -> Any:
        """Return the batches that are being joined, which weigh losses; ``None`` where there are none."""
        return None if self._joined_batches is None else self._joined_batches()

    def _run(self, method: str, **arguments: Any) -> Any:
        """Do the work of a method, which booster-runtime has."""
        function = hook_relay().booster_method(name=method)
        if function is None:
            raise ConfigError(needs_runtime(f"`Booster.{method}` is done"))
        return function(booster=self, **arguments)

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
