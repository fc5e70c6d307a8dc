"""``generate`` of a model that is split over ranks: every rank of a replica calls it and gets the same tokens.

transformers' loop, or a model's own, runs on every rank as it is. Where the model is cut into stages, each forward of
the loop is one pass through the pipeline, whose outputs the last stage sends to the others; see `stage_cache` for the
keys and values that each keeps. Where sequences are split none are kept: each rank would have those of its part. Ranks
draw tokens from the random numbers of the replica's first rank.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.ranks import NamedCall
from booster_hybrid.random_streams import drawing_alike
from booster_hybrid.same_batch import check_same_batch
from booster_hybrid.same_options import check_same_options
from booster_hybrid.stage_cache import StageCache, can_keep
from booster_runtime import collectives
from booster_runtime.sharding import generating_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from booster_hybrid.model import HybridModel


@dataclass(frozen=True)
class _Shape:
    """What ranks without the last stage know of a tensor that they are to get; no tuple, which is a container."""

    size: tuple[int, ...]
    dtype: torch.dtype


def replace_generate(model: HybridModel, device: torch.device, *, splits_sequences: bool) -> None:
    """Let ``generate`` of a boosted model work on all of it, if the user's model has one.

    Args:
        model: The boosted model.
        device: Where it computes.
        splits_sequences: Whether ranks have parts of each sequence.
    """
    if callable(getattr(model.unwrap(), "generate", None)):
        model.replace_method("generate", functools.partial(_bound, device=device, splits_sequences=splits_sequences))


def _bound(model: Any, *, device: torch.device, splits_sequences: bool) -> Any:
    method = model.unwrap().generate

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        may_keep = not splits_sequences and (model.engine is None or can_keep(model.unwrap()))
        return _generate(model, method, args, kwargs, device, may_keep=may_keep)

    return generate


def _generate(
    model: HybridModel,
    method: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    *,
    may_keep: bool,
) -> Any:
    """Run ``generate`` of the user's model.

    Args:
        model: The boosted model.
        method: The user's model's.
        args: Its arguments.
        kwargs: Those by name.
        device: Where the model computes.
        may_keep: Whether each rank can keep keys and values between tokens.

    Raises:
        ConfigError: If ranks of a replica were given different prompts or options, if a clock ends the loop, if keys
            and values are asked for that can't be kept, or if the encoder of a model that is cut into stages would run
            by itself.

    Collective: the ranks that work on one batch together; with ``zero_stage=3`` or experts that are spread, those whose
    parameters or tokens they exchange, which take as many forwards as the longest of them.
    """
    inner = generating_model(model.unwrap())
    with NamedCall("generate", model.replica.ranks):
        check_same_batch((args, kwargs), model.replica.group, list(model.replica.ranks))
        check_same_options(method, args, kwargs, inner, model.replica)
    if inner is not None:
        if not may_keep:
            _leave_out_cache(kwargs)
        if model.engine is not None and kwargs.get("past_key_values") is not None:
            msg = (
                "`generate` was given `past_key_values`, and the model is cut into pipeline stages, each of which "
                "keeps those of its own layers. Leave them out, and pass the whole text."
            )
            raise ConfigError(msg)
        if model.engine is not None and inner.config.is_encoder_decoder:
            msg = (
                f"`generate` calls a part of {type(inner).__name__} by itself, its encoder, and the model is cut into "
                "pipeline stages. Save it, and load it under `pp_size=1` to generate."
            )
            raise ConfigError(msg)
        if set(model.callers.ranks) - set(model.replica.ranks):
            kwargs.setdefault("synced_gpus", True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(NamedCall("generate", model.replica.ranks))
        stack.enter_context(drawing_alike(model.replica, device))
        if inner is not None and not (may_keep and model.engine is None):
            stack.enter_context(_waiting_with_the_same_inputs(inner))
        if model.engine is not None:
            kept = StageCache(is_asked_for=bool(kwargs.get("use_cache") or kwargs.get("cache_implementation")))
            stack.enter_context(_forwards_of_all_stages(model, inner or model.unwrap(), device, kept))
            if inner is not None and may_keep:
                stack.enter_context(_replaced(inner, "_prepare_cache_for_generation", kept.instead_of))
        outputs = method(*args, **kwargs)
    if model.engine is not None and getattr(outputs, "past_key_values", None) is not None:
        outputs.past_key_values = None  # of some layers, and other ones on each rank
    return outputs


def _leave_out_cache(kwargs: dict[str, Any]) -> None:
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        msg = (
            "`generate` can't keep keys and values: sequences are split, and each rank has those of its part, or a "
            "model with a loop of its own is cut into stages, each of which has those of its layers. Leave out "
            "`use_cache` and `past_key_values`; each token is computed from the whole text."
        )
        raise ConfigError(msg)
    kwargs["use_cache"] = False


_OF_TOKENS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_OF_DECODED = ("decoder_attention_mask", "decoder_position_ids", "token_type_ids")
"""What has an entry for each token of the text, in decoders alone and in those that have an encoder."""


@contextlib.contextmanager
def _waiting_with_the_same_inputs(inner: Any) -> Iterator[None]:
    """Let a rank whose text is complete compute it again while others go on with theirs.

    Its text stays as it is, and transformers adds a position to its mask in each round nevertheless, as caches grow.
    """
    growing = _OF_DECODED if inner.config.is_encoder_decoder else _OF_TOKENS

    def instead_of(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A text that begins with embeddings is longer than its tokens.
            if kwargs.get("inputs_embeds") is None and kwargs.get("past_key_values") is None:
                length = input_ids.shape[-1]
                for name in growing:
                    value = kwargs.get(name)
                    if isinstance(value, Tensor) and value.shape[-1] > length:
                        kwargs[name] = value[..., :length]
            return method(input_ids, *args, **kwargs)

        return prepare

    with _replaced(inner, "prepare_inputs_for_generation", instead_of):
        yield


@contextlib.contextmanager
def _replaced(inner: Any, name: str, instead_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let a method of one model be another inside, made of it."""
    present = vars(inner).get(name)
    setattr(inner, name, instead_of(getattr(inner, name)))
    try:
        yield
    finally:
        if present is None:
            vars(inner).pop(name, None)
        else:
            setattr(inner, name, present)


@contextlib.contextmanager
def _forwards_of_all_stages(
    model: HybridModel, inner: nn.Module, device: torch.device, kept: StageCache
) -> Iterator[None]:
    """Let each forward of a module be one through the pipeline, with its outputs on every rank."""
    signature = inspect.signature(inner.forward)
    present = vars(inner).get("forward")

    def take_away() -> None:
        if present is None:
            vars(inner).pop("forward", None)
        else:
            inner.forward = present

    def forward(*args: Any, **kwargs: Any) -> Any:
        take_away()  # the stages call it in turn
        try:
            with kept.during_forward():
                return _through_stages(model, _by_name(signature, args, kwargs), device, kept)
        finally:
            inner.forward = forward

    forward.__signature__ = signature  # type: ignore[attr-defined] # transformers looks at what a model takes
    inner.forward = forward
    try:
        yield
    finally:
        take_away()


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as microbatches have them."""
    named = dict(signature.bind_partial(*args).arguments)
    return {**named, **kwargs}


def _through_stages(model: HybridModel, batch: dict[str, Any], device: torch.device, kept: StageCache) -> Any:
    """Run a batch through the pipeline as one microbatch, and return the model's outputs on every rank of it.

    Collective: the ranks of the replica.
    """
    assert model.engine is not None, "asked for where there are stages only"
    run, last = model.engine.forward(batch)
    model.engine.raise_together(run.error or model.engine.written())
    outputs = pytree.tree_map_only(Tensor, _whole, kept.left_out(run.outputs.get(0)))
    form = pytree.tree_map_only(Tensor, lambda tensor: _Shape(tuple(tensor.shape), tensor.dtype), outputs)
    group = model.local.pipeline
    form = collectives.all_gather_object(form, group)[last]
    tensors = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))

    def receive(shape: _Shape) -> Tensor:
        made = next(tensors) if run.outputs else torch.empty(shape.size, dtype=shape.dtype, device=device)
        dist.broadcast(made, group=group, group_src=last)
        return made

    return kept.put_in(pytree.tree_map_only(_Shape, receive, form))


def _whole(tensor: Any) -> Tensor:
    """Return a tensor of the last stage's outputs; logits of which ranks have parts are put together."""
    whole: Tensor = tensor.gather() if hasattr(type(tensor), "local") else tensor
    return whole.contiguous()
