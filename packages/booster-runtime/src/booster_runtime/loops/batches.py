"""A training step and an evaluation of one batch, the same under every plugin, with a pipeline or without.

Losses are weighted over all micro-batches and ranks before backward, so that the gradients are those of one large
batch, also where micro-batches count differently many tokens (huggingface/transformers#34191 tells what becomes of a
mean of means).
"""

from __future__ import annotations

import contextlib
import inspect
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import OptimizerWrapper, PipelinePlugin, as_tuple, unwrap_model
from booster_core.ranks import NamedCall
from booster_runtime import collectives
from booster_runtime.data.batches import call_with, check_targets, move_batch, num_samples, taken_by
from booster_runtime.data.loader import loader_of
from booster_runtime.label_means import weighing_parts
from booster_runtime.loops.uneven import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core import Booster

    Criterion = Callable[[Any, Any], Tensor]
    Weight = Callable[[Any], "float | Tensor"]


class Evaluation(NamedTuple):
    """What `evaluate_batch` computes.

    Attributes:
        loss: The mean loss of all ranks' batches, a scalar tensor, the same on every rank.
        outputs: What the model returned for this rank's batch; ``None`` on ranks without a pipeline's last stage.
        weight: Total weight of the loss over all ranks, the same on every rank: the mean over a data set is the sum of
            ``loss * weight`` divided by the sum of ``weight``.
    """

    loss: Tensor
    outputs: Any
    weight: float


def train_batch(
    booster: Booster,
    data_iter: Iterator[Any],
    model: nn.Module,
    criterion: Criterion | None,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    accumulation: int = 1,
    max_norm: float | None = None,
    weight: Weight | None = None,
) -> Tensor:
    """Take one optimizer step on the next batches: forward, backward, clip, step, ``zero_grad``.

    Works under every plugin, with a pipeline or without. Batches are moved to the device. A mapping becomes keyword
    arguments of the model, a list or tuple positional ones; entries that its forward does not take are left to the
    criterion.

    Args:
        booster: Of the run.
        data_iter: Yields batches, such as ``iter(dataloader)``.
        model: The boosted model.
        criterion: Called as ``criterion(outputs, batch)``, returns a mean; ``None`` takes the loss that the model's
            outputs have, as those of transformers do.
        optimizer: The boosted optimizer, or several of the model.
        accumulation: Number of batches to take for the step; fewer where no more are left.
        max_norm: Clip gradients to this global norm.
        weight: Counts what the criterion is a mean of in a batch or a part of one, such as labels that are not
            -100: ``weight(batch)``. Then all batches and ranks together give the gradients of one large batch. By
            default, all batches weigh the same.

    Returns:
        The mean loss over all ranks and batches, a scalar tensor, the same on every rank.

    Raises:
        StopIteration: If no batch is left.
        TypeError: If the model or optimizer is not a boosted one, or ``data_iter`` no iterator.
        ConfigError: If ``accumulation`` is no positive integer, weights sum up to 0, losses are weighed by a block
            around, or it can't be told which entries of a tuple are for the model.

    Collective: every rank of the world.
    """
    model = booster.boosted_model(model, "train_batch")
    optimizers = as_tuple(optimizer)
    strange = [type(each).__name__ for each in optimizers or (optimizer,) if not isinstance(each, OptimizerWrapper)]
    if strange:
        got = strange[0]
        msg = f"`train_batch` needs the optimizer returned by `Booster.boost`; got `{got}`."
        raise TypeError(msg)
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        msg = f"`accumulation={accumulation!r}` is no number of batches. Pass an integer of at least 1."
        raise ConfigError(msg)
    _check_iterator(data_iter, "train_batch")
    around = booster.loss_weight(model)
    if around != 1:
        msg = (
            "`train_batch` takes a whole step, whose loss the block around, as of `accumulate`, multiplies by "
            f"{around:g} once more. Call `train_batch(booster, ..., accumulation=N)` outside of the block, or "
            "`booster.backward` in it."
        )
        raise ConfigError(msg)
    batches = list(islice(data_iter, accumulation))
    if not batches:
        raise StopIteration
    run = _Run(booster, model, criterion, weight)
    share = run.share_of(batches)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with contextlib.nullcontext() if is_last else booster.no_sync(model):
            run.forward(batch, share, optimizers[0])
    loss = run.mean_loss()
    if max_norm is not None:
        optimizers[0].clip_grad_by_norm(max_norm)
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()
    return loss


def evaluate_batch(
    booster: Booster,
    data_iter: Iterator[Any],
    model: nn.Module,
    criterion: Criterion | None,
    *,
    weight: Weight | None = None,
) -> Evaluation:
    """Compute loss and outputs of the next batch, in evaluation mode and without gradients.

    Args:
        booster: Of the run.
        data_iter: As for `train_batch`, as are the others. Of a boosted loader's own iterator, samples repeated
            at an epoch's end don't count, and a batch of fewer samples weighs less; but in pipelines they do.
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
    model = booster.boosted_model(model, "evaluate_batch")
    _check_iterator(data_iter, "evaluate_batch")
    batch = next(data_iter)
    loader = loader_of(data_iter)
    whole: Callable[[Any], Any] = lambda values: values  # noqa: E731 - replaced below
    if loader is not None and not (isinstance(booster.plugin, PipelinePlugin) and booster.plugin.has_pipeline(model)):
        batch, whole, part = loader.counted_part(batch)
        given, weight = weight, lambda each: part if given is None or not part else given(each)
    run = _Run(booster, model, criterion, weight)
    with _evaluating(model), torch.no_grad():
        share = run.share_of([batch])
        outputs = run.forward(batch, share, None)
    return Evaluation(run.mean_loss(), whole(outputs), run.total_weight)


def _check_iterator(data_iter: Iterator[Any], call: str) -> None:
    """Check that the next call goes on where this one ends, and that batches have no weights of their own.

    Raises:
        TypeError: If it is a data loader or a list, of which each call would take the first batches.
        ConfigError: If it is what `join` returned.
    """
    if not hasattr(data_iter, "__next__"):
        msg = (
            f"`{call}` takes an iterator over batches, such as `iter(dataloader)`, made once for each epoch; "
            f"got `{type(data_iter).__name__}`."
        )
        raise TypeError(msg)
    if inspect.isgenerator(data_iter) and data_iter.gi_code is join.__code__:
        msg = (
            f"`{call}` does not know which batches of `join` are repeated. Call the model and `booster.backward`, or "
            "give all ranks equally many batches."
        )
        raise ConfigError(msg)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Parents come first. Layers that merge weights in evaluation undo that in their own `train`.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        # A `train` may have reached a module that several parents share, or leave some modules out.
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


class _Run:
    """Forward, and backward, of the batches of one step.

    Args:
        booster: Which boosted the model.
        model: The boosted model.
        criterion: The user's; ``None`` where the model's outputs have a loss.
        weight: Counts what a batch's loss is a mean of; ``None`` where all batches weigh the same.
    """

    def __init__(self, booster: Booster, model: nn.Module, criterion: Criterion | None, weight: Weight | None) -> None:
        self._booster, self._model, self._weight = booster, model, weight
        self._criterion = _own_loss if criterion is None else criterion
        self._has_targets = criterion is not None
        _, self._num_replicas = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
        self._losses: list[Tensor] = []
        self.total_weight = 0.0
        """Of the batches, over all ranks."""

    def share_of(self, batches: Sequence[Any]) -> float:
        """Return by what a batch's loss, times its weight, is multiplied, and set the total weight.

        Strategies average gradients over the data parallel ranks.

        Raises:
            ConfigError: If the weights do not sum up to a positive number.

        Collective: every rank of the world, if there is a ``weight``.
        """
        if self._weight is None:
            self.total_weight = float(len(batches) * self._num_replicas)
            return 1.0 / len(batches)
        own = sum(float(self._weight(batch)) for batch in batches)
        total = torch.tensor([own, 1.0], dtype=torch.float64 if self._device.type == "cpu" else torch.float32)
        total = self._summed(total)
        # Ranks that work on a batch together count it each.
        self.total_weight = float(total[0]) * self._num_replicas / float(total[1])
        if not self.total_weight > 0:
            msg = (
                f"The weights of the batches sum up to {self.total_weight:g} over all ranks, so that there is no mean "
                "loss. `weight(batch)` counts what the criterion averages over, such as labels that are not -100."
            )
            raise ConfigError(msg)
        return self._num_replicas / self.total_weight

    def forward(self, batch: Any, share: float, optimizer: OptimizerWrapper | None) -> Any:
        """Run a batch forward and, with an optimizer, backward; return the outputs where there is no optimizer.

        Collective: every rank of the plugin's mesh.
        """
        plugin = self._booster.plugin
        if isinstance(plugin, PipelinePlugin) and plugin.has_pipeline(self._model):
            with contextlib.nullcontext() if self._weight is None else weighing_parts():
                result = self._booster.execute_pipeline(
                    iter([batch]),
                    self._model,
                    self._pipeline_criterion(batch, share),
                    optimizer,
                    return_loss=True,
                    return_outputs=optimizer is None,
                )
            if result["loss"] is not None:
                self._losses.append(result["loss"].detach())
            return result.get("outputs")
        batch = move_batch(batch, self._device)
        module = unwrap_model(self._model)
        if self._has_targets:
            check_targets(module, batch)
        outputs = call_with(self._model, taken_by(module, batch))
        loss = self._criterion(outputs, batch)
        loss = loss * (share if self._weight is None else _product(share, self._weight(batch), loss))
        if optimizer is not None:
            outputs = None  # logits in fp32 may be what makes the peak of backward
            self._booster.backward(loss, optimizer)
        self._losses.append(loss.detach())
        return outputs

    def mean_loss(self) -> Tensor:
        """Return the weighted mean loss of all batches and ranks, the same on each: fp64 where losses are, else fp32.

        Collective: every rank of the world.
        """
        losses = torch.stack(self._losses).to(self._device) if self._losses else torch.zeros(1, device=self._device)
        own = losses.sum(dtype=_at_least_fp32(losses))
        if self._booster.context.coordinator.world_size == 1:
            return own
        # Sent in fp64, because a stage without a loss doesn't know its dtype.
        facts = torch.tensor([bool(self._losses), own.dtype == torch.float64], dtype=torch.float64, device=self._device)
        total, num_ranks, num_double = self._summed(torch.cat([own.double().view(1), facts]))
        is_double = own.dtype == torch.float64 or (not self._losses and bool(num_double))
        mean: Tensor = total / num_ranks
        return mean.to(torch.float64 if is_double else torch.float32)

    @property
    def _device(self) -> torch.device:
        return self._booster.device

    def _summed(self, values: Tensor) -> Tensor:
        values = values.to(self._device)
        if self._booster.context.coordinator.world_size > 1:
            with NamedCall("mean loss"):
                collectives.all_reduce(values).wait()
        return values

    def _pipeline_criterion(self, batch: Any, share: float) -> Criterion:
        """Return a criterion for microbatches, whose losses the pipeline averages by their numbers of samples."""
        criterion, weight = self._criterion, self._weight
        count = num_samples(batch) if weight is not None else 1

        def weighted(outputs: Any, microbatch: Any) -> Tensor:
            loss = criterion(outputs, microbatch)
            if weight is None:
                return loss * share
            return loss * _product(share * count / num_samples(microbatch), weight(microbatch), loss)

        return weighted


def _product(share: float, weight: float | Tensor, loss: Tensor) -> float | Tensor:
    """Return a share times a weight, as exact as a loss needs it: integers times a float would give fp32."""
    if not isinstance(weight, torch.Tensor):
        return share * weight
    return share * weight.to(_at_least_fp32(loss))


def _at_least_fp32(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _own_loss(outputs: Any, batch: Any) -> Tensor:
    """Return the loss that a model of transformers computes itself.

    Raises:
        ConfigError: If the outputs have none.
    """
    del batch
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if not isinstance(loss, torch.Tensor):
        msg = (
            f"The model's outputs (`{type(outputs).__name__}`) have no loss. Pass a criterion, which is called as "
            "`criterion(outputs, batch)`, or batches with labels to a model that computes its own loss."
        )
        raise ConfigError(msg)
    return loss
