"""``generate`` of a model that is split over ranks: every rank of a replica calls it and gets the same tokens.

transformers' loop, or a model's own, runs on every rank as it is. Where sequences are split, no keys and values are
kept: each rank would have those of its part. Ranks draw tokens from the random numbers of the replica's first rank. A
model that is cut into pipeline stages does not generate.

Ranks must have the same options: with other ones they would wait for each other, or go on with other texts. Numbers and
words among the arguments are compared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator, NamedCall
from booster_hybrid.random_streams import drawing_alike
from booster_hybrid.same_training import check_same_batch
from booster_runtime.sharding import generating_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from booster_hybrid.mesh import Axis
    from booster_hybrid.model import HybridModel


def check_same_options(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: Any, replica: Axis
) -> None:
    """Raise on all ranks of a replica if they generate with different options.

    Args:
        method: The ``generate`` that is called.
        args: Its arguments; tensors among them are for `check_same_batch`.
        kwargs: Those by name.
        inner: The model of transformers that generates; ``None`` for a loop of the user's own.
        replica: The ranks.

    Raises:
        ConfigError: Naming the options and who has which value; or if a clock ends the loop, which each rank reads
            for itself.

    Collective: the ranks of the replica.
    """
    with contextlib.suppress(TypeError):  # the method itself raises what it can't be called with
        kwargs = {**inspect.signature(method).bind_partial(*args).arguments, **kwargs}
    own = {name: value for name, value in kwargs.items() if isinstance(value, (bool, int, float, str))}
    remedy = "These ranks generate one text together: pass the same on each."
    DistCoordinator().agree("generate", own, remedy=remedy, process_group=replica.group)
    config = kwargs.get("generation_config") or getattr(inner, "generation_config", None)
    if replica.size > 1 and inner is not None and (kwargs.get("max_time") or getattr(config, "max_time", None)):
        msg = (
            "`max_time` ends the loop by a clock, which each of the ranks that generate one text together reads for "
            "itself: some would wait for a token more than others. Use `max_new_tokens`."
        )
        raise ConfigError(msg)


def replace_generate(model: HybridModel, device: torch.device, *, splits_sequences: bool) -> None:
    """Let ``generate`` of a boosted model work on all of it.

    Args:
        model: The boosted model.
        device: Where it computes.
        splits_sequences: Whether ranks have parts of each sequence.
    """
    model.replace_method("generate", functools.partial(_bound, device=device, splits_sequences=splits_sequences))


def _bound(model: Any, *, device: torch.device, splits_sequences: bool) -> Any:
    method = model.unwrap().generate

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        return _generate(model, method, args, kwargs, device, splits_sequences=splits_sequences)

    return generate


def _generate(
    model: HybridModel,
    method: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    *,
    splits_sequences: bool,
) -> Any:
    """Run ``generate`` of the user's model.

    Args:
        model: The boosted model.
        method: The user's model's.
        args: Its arguments.
        kwargs: Those by name.
        device: Where the model computes.
        splits_sequences: Whether ranks have parts of each sequence.

    Raises:
        ConfigError: If ranks of a replica were given different prompts or options, if a clock ends the loop, if keys
            and values are asked for that can't be kept, or if the model is cut into stages.

    Collective: the ranks that work on one batch together; with ``zero_stage=3`` or experts that are spread, those whose
    parameters or tokens they exchange, which take as many forwards as the longest of them.
    """
    if model.engine is not None:
        msg = (
            "The model is cut into pipeline stages, through which `generate` does not run. Save it by "
            "`booster.save_model`, and generate from the files with `tp_size` or on one device; "
            "`booster.execute_pipeline` without an optimizer evaluates, with `return_outputs=True` for logits."
        )
        raise ConfigError(msg)
    inner = generating_model(model.unwrap())
    with NamedCall("generate", model.replica.ranks):
        check_same_batch((args, kwargs), model.replica.group, list(model.replica.ranks))
        check_same_options(method, args, kwargs, inner, model.replica)
    if inner is not None:
        if splits_sequences:
            _leave_out_cache(kwargs)
        if set(model.callers.ranks) - set(model.replica.ranks):
            kwargs.setdefault("synced_gpus", True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(NamedCall("generate", model.replica.ranks))
        stack.enter_context(drawing_alike(model.replica, device))
        if inner is not None and splits_sequences:
            stack.enter_context(_waiting_with_the_same_inputs(inner))
        return method(*args, **kwargs)


def _leave_out_cache(kwargs: dict[str, Any]) -> None:
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        msg = (
            "`generate` can't keep keys and values: sequences are split, and each rank has those of its part. Leave "
            "out `use_cache` and `past_key_values`; each token is computed from the whole text."
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
