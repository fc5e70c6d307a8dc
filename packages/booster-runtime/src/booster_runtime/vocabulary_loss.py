"""Cross entropy over a large vocabulary from hidden states and the output head: all logits never exist at once.

Logits are computed for a chunk of tokens at a time, and so are their gradients, in forward: of a chunk remain its loss,
the gradient of its hidden states and a sum into the gradient of the head's weight. Backward multiplies these by the
gradient of the loss.

The head is called as a module, once, so that whatever a strategy does around its forward (gathering its weight,
splitting its vocabulary) happens as for logits.

torch 2.13 has a `linear_cross_entropy` of its own. It adds losses up in the format of the hidden states (for 2,048
tokens in bf16 the sum was 4% off), and took 4 to 12 times as long on a CPU.

While a causal language model of transformers trains on labels, its head returns this loss, and its loss function takes
that in the place of logits. This is right for models that hand the head's outputs to the loss function as they are, and
every call checks that.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_core.state import own_class
from booster_runtime.label_means import labels_of_mean
from booster_runtime.memory import block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


_CHUNK_BYTES, _DEVICE_CHUNK_BYTES = 1 << 27, 1 << 29
"""Logits that exist at once, in the format of the head: fewer cost more passes over the weight's gradient."""
_BLOCK_BYTES, _DEVICE_BLOCK_BYTES = 1 << 22, 1 << 27
"""Of these, what is in fp32 at once."""
_ABSENT = object()
_REMEDY = "Compute its loss from whole logits: leave out `enable_linear_cross_entropy`."


class SplitVocabulary(Protocol):
    """How tensor parallel ranks share the vocabulary of a head: what its ``forward`` has as ``vocabulary``.

    Attributes:
        first: Index of this rank's first logit in it.
        largest_size: Length of the longest part, so that all ranks take chunks of equally many tokens.
    """

    first: int
    largest_size: int

    def check(self, labels: Tensor) -> None:
        """Raise `IndexError` for labels outside of the whole vocabulary, on every rank."""

    def gather(self, terms: Tensor) -> Tensor:
        """Return the ranks' terms, one after the other along a new first dimension."""

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""


@dataclass(frozen=True)
class _LabelLoss:
    """The loss of one token.

    Args:
        ignore_index: Label of tokens that don't count.
        vocabulary: How ranks share the words; ``None`` if they don't.
    """

    ignore_index: int
    vocabulary: SplitVocabulary | None = None

    def differentiate(self, logits: Tensor, labels: Tensor, *, is_used: bool) -> Tensor:
        """Return the sum of a chunk's losses, and put the gradient of this sum in the place of the logits.

        Args:
            logits: Shape ``(tokens, local vocabulary)``.
            labels: Shape ``(tokens,)``, indices of the whole vocabulary.
            is_used: Whether the gradient is used; else the logits are left in any state.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        is_counted = labels != self.ignore_index
        index, is_here = self._local(labels.masked_fill(~is_counted, 0), logits.shape[-1])
        of_label = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(wide)
        terms = torch.empty((3, labels.numel()), dtype=wide, device=logits.device)
        terms[2] = of_label if is_here is None else of_label.masked_fill(~is_here, 0)
        for rows in _chunks(logits, logits.shape[-1], wide, _BLOCK_BYTES, _DEVICE_BLOCK_BYTES):
            values = logits[rows]
            # Where all logits are -inf, their differences to it would be no numbers.
            largest = values.amax(-1).to(wide).clamp_(min=torch.finfo(wide).min)
            values = values.sub_(largest.unsqueeze(-1)) if values.dtype == wide else values - largest.unsqueeze(-1)
            values.exp_()
            terms[0, rows], terms[1, rows] = largest, values.sum(-1)
            if is_used and values.dtype != logits.dtype:
                logits[rows] = values
        of_ranks = terms.unsqueeze(0) if self.vocabulary is None else self.vocabulary.gather(terms)
        largest = of_ranks[:, 0].amax(0)
        normalizer = (of_ranks[:, 1] * (of_ranks[:, 0] - largest).exp_()).sum(0)
        # Not added to the largest logit first, where small differences would be lost.
        losses = normalizer.log() - (of_ranks[:, 2].sum(0) - largest)
        if is_used:
            factor = (terms[0] - largest).exp_() / normalizer * is_counted
            for rows in _chunks(logits, logits.shape[-1], wide, _BLOCK_BYTES, _DEVICE_BLOCK_BYTES):
                logits[rows] *= factor[rows].unsqueeze(-1)  # the CPU has products of two formats in memory, whole
            # Computed in the wide format: probabilities near 1 have few digits left in narrow ones.
            at_label = ((of_label - largest).exp_() / normalizer - 1).mul_(is_counted)
            places = torch.arange(labels.numel(), device=logits.device), index
            changed = at_label.to(logits.dtype)
            # Not `scatter_`, which has narrow formats in memory in fp32, whole.
            logits[places] = changed if is_here is None else torch.where(is_here, changed, logits[places])
        return losses.masked_fill_(~is_counted, 0).sum()

    def _local(self, index: Tensor, local_size: int) -> tuple[Tensor, Tensor | None]:
        """Return the places of labels among the local logits, and which are there; ``None`` where all are."""
        if self.vocabulary is None:
            return index, None
        self.vocabulary.check(index)
        index = index - self.vocabulary.first
        is_here = (index >= 0) & (index < local_size)
        return index.masked_fill(~is_here, 0), is_here


class _SumOfLosses(torch.autograd.Function):
    """Computes the sum of the counted tokens' losses, and with it all gradients of that sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss: _LabelLoss,
        is_differentiated: bool,  # noqa: FBT001 - autograd functions take no keywords
    ) -> Tensor:
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        wanted = [is_differentiated and needed for needed in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        gradients = [
            torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None,
            torch.zeros(weight.shape[:1], dtype=wide, device=weight.device) if wanted[2] else None,
        ]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        vocabulary = loss.vocabulary
        largest_size = weight.shape[0] if vocabulary is None else vocabulary.largest_size
        with torch.autocast(device_type, enabled=False):
            for tokens in _chunks(hidden, largest_size, hidden.dtype, _CHUNK_BYTES, _DEVICE_CHUNK_BYTES):
                part = hidden[tokens]
                logits = nn.functional.linear(part, weight, bias)
                total += loss.differentiate(logits, labels[tokens], is_used=any(wanted))
                _add(gradients, tokens, logits, part, weight)
                del logits  # before there are those of the next chunk
        if vocabulary is not None and gradients[0] is not None:
            vocabulary.sum(gradients[0])
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            msg = "Backward has run through `linear_cross_entropy` already. Pass `retain_graph=True` the first time."
            raise RuntimeError(msg)
        # There is no public name for whether `retain_graph` was passed. If not, the memory serves the results.
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
        results: list[Tensor | None] = []
        for index, (found, dtype) in enumerate(zip(ctx.gradients, ctx.dtypes, strict=True)):
            scaled = None if found is None else (found.mul(gradient) if is_kept else found.mul_(gradient))
            results.append(None if scaled is None else scaled.to(dtype))
            if not is_kept:
                ctx.gradients[index] = None
        if not is_kept:
            ctx.gradients = None
        return *results, None, None, None


def _chunks(of: Tensor, row_numel: int, dtype: torch.dtype, on_host: int, on_device: int) -> Iterator[slice]:
    """Cut the first dimension of a tensor, so that rows of some other length take a limited number of bytes."""
    step = max(block_bytes(of.device, on_host, on_device) // max(row_numel * dtype.itemsize, 1), 1)
    yield from (slice(start, min(start + step, of.shape[0])) for start in range(0, of.shape[0], step))


def _add(gradients: list[Tensor | None], tokens: slice, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add a chunk's part to the gradients of hidden states, weight and bias."""
    of_hidden, of_weight, of_bias = gradients
    if of_hidden is not None:
        torch.mm(of_logits, weight, out=of_hidden[tokens])
    if of_weight is not None and of_weight.dtype == of_logits.dtype:
        of_weight.addmm_(of_logits.t(), hidden)
    elif of_weight is not None and of_weight.is_cuda:
        torch.addmm(of_weight, of_logits.t(), hidden, out_dtype=of_weight.dtype, out=of_weight)
    elif of_weight is not None:
        # The products are in the narrow format, and few of them exist at once.
        for rows in _chunks(of_weight, of_weight.shape[1], of_logits.dtype, _BLOCK_BYTES, _DEVICE_BLOCK_BYTES):
            of_weight[rows] += of_logits[:, rows].t() @ hidden
    if of_bias is not None:
        of_bias += of_logits.sum(0, dtype=of_bias.dtype)


class HeadLoss:
    """A head's forward that returns the sum of losses in the place of logits, for one call.

    Args:
        head: The head.
        labels: Shape ``(...)``, the tokens that its inputs, of shape ``(..., hidden size)``, are to predict.
        ignore_index: Label of tokens that don't count.
        on_loss: Called with the loss.
    """

    def __init__(
        self,
        head: nn.Module,
        labels: Tensor,
        ignore_index: int,
        on_loss: Callable[[Tensor], object] = lambda _: None,
    ) -> None:
        self._head, self._labels, self._ignore_index, self._on_loss = head, labels, ignore_index, on_loss

    @_disable_dynamo  # the compiler would unroll the loop over chunks
    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the sum of the counted tokens' losses, without dimensions, in fp32 or wider.

        Raises:
            ConfigError: If labels and hidden states have other leading dimensions.
        """
        head: Any = self._head
        if hidden.shape[:-1] != self._labels.shape:
            msg = (
                f"`labels` of shape {tuple(self._labels.shape)} do not fit hidden states of shape "
                f"{tuple(hidden.shape)}: each hidden state has one label. Where ranks split the sequence, leave this "
                "loss out; it is computed over each rank's positions there anyway."
            )
            raise ConfigError(msg)
        weight, bias = head.weight, head.bias
        for parameter in (weight, bias):
            if parameter is not None:
                parameter.dim()  # where an updated parameter is still being gathered, a call of torch's waits for it
        total: Tensor = _SumOfLosses.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            self._labels.to(hidden.device).reshape(-1),
            _LabelLoss(self._ignore_index, getattr(self._forward, "vocabulary", None)),
            torch.is_grad_enabled(),
        )
        self._on_loss(total)
        return total

    @_disable_dynamo
    def run(self, hidden: Tensor) -> Tensor:
        """Call the head for its loss."""
        with self.in_place():
            total: Tensor = self._head(hidden)
        return total

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the head return its loss for the block.

        Raises:
            ConfigError: If the head does more than a linear layer does.
        """
        own = vars(self._head)
        self._forward: Any = own.get("forward", _ABSENT)
        is_plain = self._forward is _ABSENT or hasattr(self._forward, "vocabulary")
        if own_class(self._head) is not nn.Linear or not is_plain:
            what = type(self._head).__name__ if is_plain else f"layer with a forward of {type(self._forward).__name__}"
            msg = (
                f"The head is a {what}, and its loss is computed by chunks for a `torch.nn.Linear` as it is. Leave "
                "adapters, quantization and 8-bit products off the head; with `pp_size`, compute the loss from whole "
                "logits, of which microbatches have few at once."
            )
            raise ConfigError(msg)
        own["forward"] = self
        try:
            yield
        finally:
            if self._forward is _ABSENT:
                del own["forward"]
            else:
                own["forward"] = self._forward


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return ``cross_entropy(head(hidden), labels)`` without having all logits in memory.

    The result and its gradients are equal to rounding; sums over tokens are computed in fp32, or in fp64 for fp64. The
    head is a linear layer of the boosted model, whole or split over tensor parallel ranks; call it where the model
    would compute logits, such as at the end of its forward, or in a criterion.

    Args:
        hidden: Shape ``(..., hidden size)``, what the head would get.
        head: A `torch.nn.Linear`, of weight shape ``(vocabulary, hidden size)``.
        labels: Shape ``(...)``, the token that each hidden state is to predict: shift them before.
        ignore_index: Label of tokens that don't count.
        reduction: ``"mean"`` over the counted tokens, or their ``"sum"``.
        num_items_in_batch: What to divide the sum by instead, as the losses of transformers take it.

    Returns:
        The loss, without dimensions, in fp32 or wider.

    Raises:
        ValueError: If ``reduction`` is another.
        ConfigError: If the head is another layer, or the shapes don't fit.
        IndexError: If a label that counts is outside of a split vocabulary; torch raises for a whole one.

    Memory: logits of a chunk, 128 MiB (512 MiB on devices) in the head's format, and from forward to backward the
    gradients of ``hidden`` and, in fp32, of the weight.

    Collective: as the head's forward.
    """
    if reduction not in ("mean", "sum"):
        msg = f"`reduction={reduction!r}` is none of 'mean', 'sum'. For losses of each token, compute the logits."
        raise ValueError(msg)
    total = HeadLoss(head, labels, ignore_index).run(hidden)
    if num_items_in_batch is None and reduction == "sum":
        return total
    count: Any = labels_of_mean(labels, ignore_index) if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def enable_linear_cross_entropy(model: nn.Module) -> None:
    """Let a causal language model of transformers train without having all logits in memory; call it before `boost`.

    In training mode, a call with ``labels`` returns the model's own loss, equal to rounding, and ``None`` for logits;
    see `linear_cross_entropy`. Calls without labels, or in evaluation mode, are as before.

    Args:
        model: The user's model, or an adapted one.

    Raises:
        TypeError: If ``model`` is not a module.
        ConfigError: If it is boosted or has this already, or no part of it is a model of transformers with a linear
            head and the usual loss of causal language models. A call of the model on labels raises it if its loss is
            not computed from the head's outputs as they are, as where logits are scaled or capped.

    Collective: none, but every rank must do the same.
    """
    if not isinstance(model, nn.Module):
        msg = f"`enable_linear_cross_entropy` needs a torch.nn.Module; got `{type(model).__name__}`."
        raise TypeError(msg)
    if isinstance(model, ModelWrapper):
        msg = "`enable_linear_cross_entropy` changes a user's model: call it before `boost`."
        raise ConfigError(msg)
    owner = _find(model)
    loss = _CausalLoss()
    owner.register_forward_pre_hook(loss.begin, with_kwargs=True)
    owner.register_forward_hook(loss.end, always_call=True)


def _find(model: nn.Module) -> Any:
    """Return the causal language model in a model.

    Raises:
        ConfigError: If there is none whose loss is known, or it was changed already.
    """
    known: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    for module in model.modules():
        head: Any = module.get_output_embeddings() if isinstance(module, known) else None
        if head is None:
            continue
        if any(isinstance(getattr(hook, "__self__", None), _CausalLoss) for hook in module._forward_hooks.values()):  # noqa: SLF001 - no public name
            msg = "`enable_linear_cross_entropy` was called for this model already."
            raise ConfigError(msg)
        from transformers.loss.loss_utils import ForCausalLMLoss

        if module.loss_function is not ForCausalLMLoss:
            msg = f"The loss of `{type(module).__name__}` is not that of causal language models. {_REMEDY}"
            raise ConfigError(msg)
        if own_class(head) is not nn.Linear:
            msg = f"The head of `{type(module).__name__}` is a `{type(head).__name__}`, not a linear layer. {_REMEDY}"
            raise ConfigError(msg)
        return module
    msg = (
        f"`{type(model).__name__}` has no causal language model of transformers in it. In a model of your own, return "
        "`linear_cross_entropy(hidden, self.head, labels)` from forward."
    )
    raise ConfigError(msg)


class _CausalLoss:
    """Puts the loss by chunks in the place of logits during a call of a model."""

    def __init__(self) -> None:
        self._labels: Tensor | None = None
        self._shifted: Tensor | None = None
        self._total: Tensor | None = None
        self._head: AbstractContextManager[None] | None = None
        self._is_used = False

    @_disable_dynamo
    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the head compute the loss, if the call has labels."""
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        labels = given.get("labels")
        if labels is None or not model.training:
            return
        from transformers.loss.loss_utils import ForCausalLMLoss

        if model.loss_function is not ForCausalLMLoss:
            msg = (
                "The model's loss function was replaced, as for sequences that are split over ranks, whose loss is "
                f"computed over each rank's positions. {_REMEDY}"
            )
            raise ConfigError(msg)
        ignore_index = given.get("ignore_index", -100)
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head = model.get_output_embeddings()
        in_place = HeadLoss(head, shifted, ignore_index, self._note).in_place()
        in_place.__enter__()
        self._head, self._labels, self._shifted, self._total, self._is_used = in_place, labels, shifted, None, False
        model.loss_function = self._divide

    def _note(self, total: Tensor) -> None:
        if self._total is not None:
            msg = f"The model calls its head more than once. {_REMEDY}"
            raise ConfigError(msg)
        self._total = total

    @_disable_dynamo
    def _divide(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        **_: Any,
    ) -> Tensor:
        """Return the mean loss of the counted tokens; takes what the loss functions of transformers take."""
        del vocab_size
        if logits is not self._total or labels is not self._labels or self._shifted is None:
            msg = f"The model changes its head's outputs, or the labels, before it computes its loss. {_REMEDY}"
            raise ConfigError(msg)
        self._is_used = True
        count: Any = labels_of_mean(self._shifted, ignore_index) if num_items_in_batch is None else num_items_in_batch
        return logits / (count.to(logits.device) if isinstance(count, Tensor) else count)

    @_disable_dynamo
    def end(self, model: Any, args: tuple[Any, ...], outputs: Any) -> Any:
        """Put back what `begin` has replaced, and take the loss out of the place of logits."""
        del args
        if self._head is None:
            return None
        self._head.__exit__(None, None, None)
        del model._loss_function  # noqa: SLF001 - what the setter of transformers sets; there is no other way back
        total, self._head, self._labels, self._shifted, self._total = self._total, None, None, None, None
        if outputs is None:  # forward has raised
            return None
        if not self._is_used:
            msg = f"The model's loss is not computed by its loss function. {_REMEDY}"
            raise ConfigError(msg)
        if is_dataclass(outputs):
            changed: Any = replace(outputs, logits=None)  # type: ignore[type-var]
            return changed
        return tuple(None if each is total else each for each in outputs)
