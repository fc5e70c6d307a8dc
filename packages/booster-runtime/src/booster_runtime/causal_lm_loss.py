"""The loss of transformers' causal language models, computed by chunks of logits, without a change of their code.

While a model trains on labels, its head returns the loss that `linear_cross_entropy` computes, and its loss function
takes that in the place of logits. This is right for models that hand the head's outputs to the loss function as they
are: every call checks that, and one on a few tokens compares the results before.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_core.state import own_class
from booster_runtime.label_means import labels_of_mean
from booster_runtime.vocabulary_loss import HeadLoss

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


_PROBE_TOKENS = 8
_REMEDY = "Compute its loss from whole logits: leave out `enable_linear_cross_entropy`."


def enable_linear_cross_entropy(model: nn.Module) -> None:
    """Let a causal language model of transformers train without having all logits in memory; call it before `boost`.

    In training mode, a call with ``labels`` returns the model's own loss, equal to rounding, and ``None`` for logits;
    see `linear_cross_entropy`. Calls without labels, or in evaluation mode, are as before.

    Args:
        model: The user's model, or an adapted one; models without values are checked in their first step only.

    Raises:
        TypeError: If ``model`` is not a module.
        ConfigError: If it is boosted or has this already, no part of it is a model of transformers with a linear head
            and the usual loss of causal language models, or its own loss and this one differ on a few tokens, as where
            logits are scaled or capped. Nothing is changed then. A call of the model raises it as well if its loss
            is not computed from the head's outputs.

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
    handles = [
        owner.register_forward_pre_hook(loss.begin, with_kwargs=True),
        owner.register_forward_hook(loss.end, always_call=True),
    ]
    try:
        if _has_values(owner):
            _compare(owner, loss)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise


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


def _has_values(model: nn.Module) -> bool:
    """Return whether a model can be run: a lazy one has no values yet, and one of a plan never has."""
    if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
        return False
    return all(type(each) is nn.Parameter and not each.is_meta for each in model.parameters())


def _compare(model: Any, loss: _CausalLoss) -> None:
    """Compare the model's own loss of a few tokens with the one by chunks.

    Raises:
        ConfigError: If they differ, or one of them can't be computed.
    """
    head, was_training = model.get_output_embeddings(), {module: module.training for module in model.modules()}
    tokens = torch.arange(_PROBE_TOKENS, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
    try:
        with torch.no_grad():
            model.eval()
            expected = model(input_ids=tokens, labels=tokens).loss
            loss.is_compared = True
            found = model(input_ids=tokens, labels=tokens).loss
    except ConfigError:
        raise
    except Exception as error:  # whatever the model's code raises
        msg = f"`{type(model).__name__}` can't compute a loss of {_PROBE_TOKENS} tokens by chunks: {error} {_REMEDY}"
        raise ConfigError(msg) from error
    finally:
        loss.is_compared = False
        for module, mode in was_training.items():
            module.training = mode
    # Both are sums of the same logits; the format that they are rounded to is the only difference.
    tolerance = 8 * torch.finfo(head.weight.dtype).eps
    if not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance):
        msg = (
            f"`{type(model).__name__}` computes a loss of {float(expected)} from logits, and from its head's outputs "
            f"it is {float(found)}. {_REMEDY}"
        )
        raise ConfigError(msg)


class _CausalLoss:
    """Puts the loss by chunks in the place of logits during a call of a model.

    Attributes:
        is_compared: Compute it in evaluation mode as well.
    """

    def __init__(self) -> None:
        self.is_compared = False
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
        if labels is None or not (model.training or self.is_compared):
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
        return logits / (count.to(logits.device) if isinstance(count, torch.Tensor) else count)

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
