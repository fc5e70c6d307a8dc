"""``generate`` of a model that is split over ranks: every rank of a replica calls it and gets the same tokens.

transformers' loop, or a model's own, runs on every rank as it is. Where sequences are split, no keys and values are
kept: each rank would have those of its part. Ranks draw tokens from the random numbers of the replica's first rank. A
model that is cut into pipeline stages does not generate.

Ranks must have the same options, from wherever these come: the arguments of `generate`, a ``generation_config`` among
them, and the one of the model where none is given. With other ones they would wait for each other, or go on with other
texts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator, NamedCall
from booster_hybrid.random_streams import drawing_alike
from booster_hybrid.same_training import check_same_batch, checksum_of
from booster_runtime.sharding import generating_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from booster_hybrid.mesh import Axis
    from booster_hybrid.model import HybridModel


_UNCOMPARED = ("streamer", "self", "transformers_version")
"""What a rank may have alone: it shows the tokens, or tells what wrote a configuration."""


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
    options = _resolved(_named(method, args, kwargs), inner)
    own = {name: _printable(value) for name, value in options.items() if not isinstance(value, torch.Tensor)}
    remedy = "These ranks generate one text together: pass the same on each, also in the model's `generation_config`."
    DistCoordinator().agree("generate", own, remedy=remedy, process_group=replica.group)
    if replica.size > 1 and inner is not None and _reads_clock(options):
        msg = (
            "`max_time` ends the loop by a clock, which each of the ranks that generate one text together reads for "
            "itself: some would wait for a token more than others. Use `max_new_tokens`."
        )
        raise ConfigError(msg)


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; the method itself raises what it can't be called with."""
    try:
        bound = inspect.signature(method).bind_partial(*args).arguments
    except TypeError:
        bound = {f"argument {index}": value for index, value in enumerate(args)}
    return {name: value for name, value in {**bound, **kwargs}.items() if name not in _UNCOMPARED}


def _resolved(given: dict[str, Any], inner: Any) -> dict[str, Any]:
    """Return what transformers makes of arguments: they take the place of settings in a ``generation_config``."""
    config = given.pop("generation_config", None)
    if config is None:
        config = getattr(inner, "generation_config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    settings["use_cache"] = None  # only who asks for a cache in a call is refused one that can't be
    return {**{name: value for name, value in settings.items() if name not in _UNCOMPARED}, **given}


def _reads_clock(options: Mapping[str, Any]) -> bool:
    criteria = options.get("stopping_criteria") or ()
    return options.get("max_time") is not None or any(type(each).__name__ == "MaxTimeCriteria" for each in criteria)


def _printable(value: Any) -> Any:
    """Return what prints alike on every rank that has the same: values, and the classes of objects."""
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    if hasattr(value, "to_dict") and not isinstance(value, (type, nn.Module)):
        value = value.to_dict()
    if isinstance(value, dict):
        return {str(name): _printable(each) for name, each in value.items() if name not in _UNCOMPARED}
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype}, checksum {checksum_of(value):#x}"
    return getattr(value, "__qualname__", type(value).__qualname__)


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
