"""The head and the loss of causal language models over logits of which each rank has those of its positions.

In a call with labels the head works on this rank's positions, and the whole logits need not exist. What it returns
looks whole all the same (`SplitLogits`): whoever asks for more than the part that is here gets the whole, be it the
model's own code or the script. Without labels, every rank's logits are whole.

Labels are shifted before they are split, so that the last position of a part predicts the first of the next one. All
ranks know all labels, so that they agree on how many count without asking; one sum over ranks of a number is all that
travels.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.exchange import gather_sequence, sum_over_ranks
from booster_hybrid.split_logits import LogitsPartition, SplitLogits, split_logits
from booster_hybrid.tensor_parallel.vocabulary import within_bounds
from booster_hybrid.torch_functions import outside_of_graphs
from booster_runtime.label_means import labels_of_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.sequence_parallel.exchange import SequenceLayout


class ByPositions(LogitsPartition):
    """Logits of shape ``(batch, positions, vocabulary)`` of which each rank has some positions.

    Args:
        layout: Who has which.
        group: The sequence parallel ranks.
    """

    def __init__(self, layout: SequenceLayout, group: RankGroup) -> None:
        super().__init__(group)
        self._layout = layout

    def shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of all logits, given that of a part."""
        first, _, *rest = local
        return torch.Size((first, self._layout.length, *rest))

    def gathered(self, local: Tensor) -> Tensor:
        """Return the logits of all positions, split by vocabulary still if the part is.

        Collective: the sequence parallel ranks.
        """
        if isinstance(local, SplitLogits):
            return local.alike(gather_sequence(local.local(), self._layout, self.group))
        return gather_sequence(local, self._layout, self.group)

    def shown(self) -> str:
        """Return what is here of what."""
        return f"logits of {self._layout.lengths[self.group.rank]} of {self._layout.length} positions"


def head_of(model: nn.Module) -> nn.Module | None:
    """Return what makes logits of hidden states in a model of transformers; ``None`` where there is no such module."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = None if getter is None else getter()
    return head


class LogitsOfPositions:
    """Lets the head and the loss of a causal language model work on this rank's positions, in calls with labels.

    Args:
        model: The user's model.
        layout_for: Returns how a sequence of a length is split.
        group: The sequence parallel ranks.
    """

    def __init__(self, model: nn.Module, layout_for: Callable[[int], SequenceLayout], group: RankGroup) -> None:
        self._layout_for, self._group = layout_for, group
        self._names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self._length: int | None = None
        self._layout: SequenceLayout | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        head: Any = head_of(model)
        head.register_forward_pre_hook(self._take)
        head.register_forward_hook(self._mark)
        model.loss_function = self._loss  # type: ignore[assignment]

    @outside_of_graphs
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the mean over the counted tokens of whole sequences, or their sum over ``num_items_in_batch``.

        Args:
            logits: Shape ``(batch, positions, vocabulary)``, split by positions or whole.
            labels: Shape ``(batch, positions)``, for whole sequences.
            vocab_size: What transformers passes; the logits know it.
            num_items_in_batch: What to divide the sum by.
            ignore_index: Label of tokens that don't count.
            shift_labels: The labels in the places of the tokens that predict them, for whole sequences.

        Raises:
            IndexError: If a label that counts is no index of the vocabulary; see `within_bounds`.

        Collective: the sequence parallel ranks, and those of the split vocabulary.
        """
        del vocab_size
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
        if logits.shape[1] != shift_labels.shape[1]:
            msg = (
                f"The loss of {shift_labels.shape[1]} labels for each sample was asked for with the logits of "
                f"{logits.shape[1]} positions. Pass `logits_to_keep` without labels only."
            )
            raise ConfigError(msg)
        shift_labels = shift_labels.to(logits.device)
        # Before each rank takes its part: all raise, or none does.
        within_bounds(shift_labels.masked_fill(shift_labels == ignore_index, 0), logits.shape[-1], "Target")
        count = labels_of_mean(shift_labels, ignore_index) if num_items_in_batch is None else num_items_in_batch
        layout = self._layout_for(shift_labels.shape[1])
        local = layout.take(shift_labels, 1, self._group.rank)
        if isinstance(logits, SplitLogits) and isinstance(logits.partition, ByPositions):
            logits = logits.local()
        else:
            logits = layout.take(logits, 1, self._group.rank)
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), local.flatten(), ignore_index=ignore_index, reduction="sum"
        )
        count = count.to(total.device) if isinstance(count, torch.Tensor) else count
        return sum_over_ranks(total, self._group) / count

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        labels: Any = {**dict(zip(self._names, args, strict=False)), **kwargs}.get("labels")
        # The compiler of a whole model takes the shape of split logits for that of their memory.
        is_whole = labels is None or torch.compiler.is_compiling()
        self._length = None if is_whole else labels.shape[1]

    def _end(self, *_: Any) -> None:
        self._length = None

    def _take(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Give the head the hidden states of the positions that are here, if it is given those of all labels."""
        del module
        is_cut = self._length is not None and args[0].dim() == 3 and args[0].shape[1] == self._length
        self._layout = self._layout_for(args[0].shape[1]) if is_cut else None
        return args if self._layout is None else (self._layout.take(args[0], 1, self._group.rank), *args[1:])

    def _mark(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        """Let the logits know which part they are, whatever the model does with them before its loss."""
        del module, args
        return logits if self._layout is None else split_logits(logits, ByPositions(self._layout, self._group))
