"""Losses of the Trainer over ranks and accumulated batches: each label and each sample counts once.

The Trainer gives a model the number of labels in all batches of a step, and takes for granted that its loss is a sum
divided by it wherever forward takes ``**kwargs``. Most heads ignore it and return a mean; so this is found by trying.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.trainer_pt_utils import find_batch_size

from booster_core.plugin import unwrap_model
from booster_core.state import without_adapters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_core import Booster

_Base: Any = object  # a Trainer comes after it, whose attributes are optional until it trains

_LEAST_CHANGE = 1e-3
"""A loss that changes by less, relative to itself, with twice the number of labels does not follow it."""
_LEAST_REST = 1e-5
"""What a loss keeps with any number of labels, relative to itself, from which on it counts."""
_LABELS = ("labels", "shift_labels")
_MEANS_OF_LABELS = {
    LOSS_MAPPING[name] for name in ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
}
"""Losses of transformers that are means over the labels that are not -100."""


class WeightedLosses(_Base):  # type: ignore[misc]
    """The overrides of a Trainer that weigh losses; comes before it in the order of classes."""

    accelerator: Any
    booster: Booster
    _follows_number: bool | None = None  # whether the loss is divided by the number of labels that it is given
    _has_rest = False  # whether it then has a part that is not, such as a router's loss
    # Whether the loss computed last was divided, or weighed, by a number of labels of all ranks; `None` for no loss.
    _is_counted: bool | None = None
    _is_padding = False  # whether all samples of this rank's batch are repeated ones

    @property
    def gather_function(self) -> Any:
        """Gathers values of a batch, each sample once, also where ``Seq2SeqTrainer`` would keep repeated ones."""
        return lambda values: self.accelerator.gather_for_metrics(values, self.args.eval_use_gather_object)

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        pass

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - the Trainer's signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss that, averaged over ranks and summed over accumulated batches, is that of the whole batch.

        A mean over this batch's labels counts by their share in the labels of all batches; a mean over something else,
        such as the loss of a router that a model adds, counts as that of each other batch does.

        Collective: every rank of the world, at the first call.
        """
        num_ranks = self.accelerator.num_processes
        num_accumulated = self.args.gradient_accumulation_steps if torch.is_grad_enabled() else 1
        self._is_counted = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if num_items_in_batch is None or num_ranks * num_accumulated == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        num_items = torch.as_tensor(num_items_in_batch).long()  # floats may be rounded to the model's format
        if self._follows_number is None:
            self._follows_number = self._try_number(model, inputs, num_items)
        weight: Any = 1 / (self.current_gradient_accumulation_steps if torch.is_grad_enabled() else 1)
        if self._follows_number is not False:
            if not self._has_rest:
                return super().compute_loss(model, inputs, return_outputs, num_items)
            # The Trainer multiplies by the number of ranks.
            weight /= num_ranks if self._is_counted else 1
            computed = super().compute_loss(model, inputs, return_outputs, num_items.item() * weight)
        elif self._is_mean_of_labels():
            weight = self._num_labels(inputs) / num_items * (num_ranks if self._is_counted else 1)
            computed = super().compute_loss(model, inputs, return_outputs, None)
        else:
            self._is_counted = False
            computed = super().compute_loss(model, inputs, return_outputs, None)
        return (computed[0] * weight, computed[1]) if return_outputs else computed * weight

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch without the samples that fill up the last one; what is gathered is cut to the others.

        Collective: every rank of the world.
        """
        state, size = self.accelerator.gradient_state, self.args.per_device_eval_batch_size
        num_ranks = self.accelerator.num_processes
        num_all = state.remainder if state.end_of_dataloader and state.remainder > 0 else size * num_ranks
        num_own = min(max(num_all - self.accelerator.index * size, 0), size)
        # A trainer with a step of its own may gather values by sample in it, of which all ranks have equally many.
        is_own = not super().prediction_step.__module__.startswith("transformers.")
        if num_ranks == 1 or is_own or not isinstance(inputs, Mapping) or find_batch_size(inputs) != size:  # type: ignore[no-untyped-call]
            return super().prediction_step(model, inputs, *args, **kwargs)
        if num_all < size * num_ranks:
            inputs = _rows(inputs, size, num_own or size)
        self._is_padding, self._is_counted = not num_own, None
        try:
            loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self._is_padding = False
        if loss is not None and self._is_counted is None:
            loss = self._weighed(loss, inputs, is_padding=not num_own)
        if loss is not None and self._is_counted and num_own:
            loss = loss * (num_all / (num_own * num_ranks))
        return loss, *(_filled(each, num_own, size) for each in others)

    def _weighed(self, loss: Tensor, inputs: Mapping[str, Any], *, is_padding: bool) -> Tensor:
        """Weigh a loss that came without `compute_loss`, as that of generated predictions does.

        Collective: every rank of the world.
        """
        self._is_counted = (
            self.args.average_tokens_across_devices
            and isinstance(inputs.get("labels"), torch.Tensor)
            and (self.label_smoother is not None or self._is_mean_of_labels())
        )
        if not self._is_counted:
            return loss
        number = self._num_labels(inputs) * (not is_padding)
        weight = number / self.accelerator.gather(number).sum() * self.accelerator.num_processes
        return torch.where(number > 0, loss * weight, weight)  # a mean over no labels is no number

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self._is_padding:
            batch_samples = [
                {name: torch.full_like(labels, -100) for name, labels in each.items() if name in _LABELS}
                for each in batch_samples
            ]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _try_number(self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor) -> bool | None:
        """Return whether the loss is divided by the number of labels; ``None`` where no rank can tell yet.

        Collective: every rank of the world.
        """
        model.eval()  # no dropout; the Trainer puts it into training mode before each step
        with torch.no_grad():
            losses: list[Any] = [
                Trainer.compute_loss(self, model, dict(inputs), num_items_in_batch=number)
                for number in (num_items, 2 * num_items)
            ]
        once, twice = map(float, losses)
        model.train(torch.is_grad_enabled())
        is_known = math.isfinite(once) and once != 0
        told = abs(once - twice) > _LEAST_CHANGE * abs(once) if is_known else None
        rest = is_known and abs(2 * twice - once) > _LEAST_REST * abs(once)
        told_by_rank = self.booster.context.coordinator.all_gather_object((told, rest))
        found = [each for each, _ in told_by_rank]
        self._has_rest = (True, True) in told_by_rank
        return None if found.count(None) == len(found) else True in found

    def _is_mean_of_labels(self) -> bool:
        """Return whether the loss is a mean over labels that are not -100, as far as transformers' table tells."""
        loss = LOSS_MAPPING.get(str(getattr(without_adapters(unwrap_model(self.model)), "loss_type", None)))
        return self.compute_loss_func is not None or loss is None or loss in _MEANS_OF_LABELS

    def _num_labels(self, inputs: Mapping[str, Any]) -> Any:
        """Return how many labels of a batch count, as the Trainer counts them."""
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
        if "shift_labels" not in inputs and getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return labels.ne(-100).sum()


def _rows(inputs: Mapping[str, Any], size: int, number: int) -> dict[str, Any]:
    """Return the first samples of a batch; if it can't be cut by samples, the batch without labels for the others."""
    sizes = {find_batch_size(value) for value in inputs.values()}  # type: ignore[no-untyped-call]
    if sizes <= {size, None}:
        return {name: recursively_apply(lambda tensor: tensor[:number], value) for name, value in inputs.items()}
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor) and len(labels) == size and not labels.is_floating_point():
        return {**inputs, "labels": torch.cat([labels[:number], torch.full_like(labels[number:], -100)])}
    return dict(inputs)


def _filled(values: Any, number: int, size: int) -> Any:
    """Return values of a batch's first samples with as many rows as a whole batch, which are dropped once gathered."""

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != number:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(size - number, *tensor.shape[1:])])

    return recursively_apply(filled, values) if number else values
