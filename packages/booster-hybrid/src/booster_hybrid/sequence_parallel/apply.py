"""Splitting sequences between the layers of an unmodified model.

The model runs on whole sequences, alike on every rank of the sequence axis, but for its list of layers: before the
first, this rank's positions are taken out of the hidden states, and after the last the ranks' parts are put together.
So positions, masks, poolers, heads and losses are the model's own, whatever they are; what grows with the number of
layers is split. Attention comes in through transformers' registry of attention functions, under a name that only models
split here are set to.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.sequence_parallel.layers import layers_of, refuse_outputs_of_layers
from booster_hybrid.sequence_parallel.layout import SequenceLayout
from booster_hybrid.sequence_parallel.loss import SequenceLoss
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility, checked, make_mask, whole_mask
from booster_hybrid.sequence_parallel.positions import PositionsKept
from booster_hybrid.sequence_parallel.random import RankStream
from booster_hybrid.sequence_parallel.ring_attention import ring_attention
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention, head_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup

ATTENTION_NAME = "booster_sequence_parallel"
"""What models that are split here have as ``config._attn_implementation``."""
_REFUSED = ("softcap", "position_bias", "s_aux", "output_attentions", "cache")
_split: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()


class _Options(TypedDict):
    scaling: float | None
    dropout: float


class SequenceParallel:
    """What the layers of one model share: who holds which positions.

    Args:
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        model_name: Class of the model, for messages.
    """

    def __init__(self, mode: str, group: TensorGroup, model_name: str) -> None:
        self.mode, self.group, self.model_name = mode, group, model_name
        self.length = 0
        self.num_attentions = 0
        self.stream = RankStream(group.rank)
        self._length_of: dict[int, int] = {}

    def layout(self, length: int) -> SequenceLayout:
        """Return how a sequence of a length is split.

        Collective: none.
        """
        return SequenceLayout(length, self.group.size, zigzag=self.mode == "ring_attn")

    def enter(self, length: int) -> SequenceLayout:
        """Note that layers run on sequences of a length now.

        Collective: none.
        """
        layout = self.layout(length)
        self.length = length
        self._length_of[layout.lengths[self.group.rank]] = length
        return layout

    def layout_of(self, local: int, mask: Any) -> SequenceLayout:
        """Return how the sequence is split of which an attention sees some positions, also when it runs again later.

        Args:
            local: Number of positions here.
            mask: What the layer was given as its mask.

        Collective: none.
        """
        if isinstance(mask, SequenceMask):
            return self.layout(mask.length)
        return self.layout(self._length_of[local])


def split_sequences(
    model: nn.Module,
    lists: Sequence[str],
    mode: str,
    group: TensorGroup,
    *,
    tensor_size: int = 1,
    parallel_output: bool = False,
) -> SequenceParallel:
    """Let a model's layers work on this rank's positions, in place.

    Args:
        model: The user's model.
        lists: Names of the lists of its layers; those that it lacks are passed over.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        tensor_size: Ranks over which attention heads are split besides.
        parallel_output: Leave the logits of causal language models that are given labels split by positions.

    Raises:
        ConfigError: If the model can't be split so.

    Collective: none.
    """
    name = type(model).__name__
    layers = layers_of(model, lists, mode)
    _check_attention(model, mode)
    if mode == "all_to_all":
        _check_heads(model, group.size, tensor_size)
    sequence = SequenceParallel(mode, group, name)
    _install_attention(model, sequence)
    kept: PositionsKept | None = None
    if parallel_output and has_causal_loss(model):
        model.loss_function = SequenceLoss(sequence.layout, group)  # type: ignore[assignment]
        kept = PositionsKept(model, sequence.layout, group)
    model.register_forward_pre_hook(refuse_outputs_of_layers, with_kwargs=True)
    for index, layer in enumerate(layers):
        hooks = _LayerHooks(sequence, is_first=index == 0, is_last=index == len(layers) - 1, kept=kept)
        layer.register_forward_pre_hook(hooks.before, with_kwargs=True)
        layer.register_forward_hook(hooks.after, always_call=True)
    return sequence


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether a model's loss is that of transformers' causal language models, which can be taken in parts."""
    is_own = vars(model).get("_loss_function") is None
    return is_own and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(model, "loss_function")


class _LayerHooks:
    def __init__(
        self, sequence: SequenceParallel, *, is_first: bool, is_last: bool, kept: PositionsKept | None
    ) -> None:
        self._sequence, self._is_first, self._is_last, self._kept = sequence, is_first, is_last, kept

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what belongs to whole sequences by this rank's part."""
        sequence = self._sequence
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._is_first:
            sequence.enter(hidden.shape[1])
        layout, rank = sequence.layout(sequence.length), sequence.group.rank

        def part(value: Any) -> Any:
            dim = _sequence_dim(value, layout.length)
            return value if dim is None else layout.take(value, dim, rank)

        if self._is_first:
            hidden = layout.take(hidden, 1, rank)
        rest = pytree.tree_map_only(torch.Tensor, part, (args[1:], kwargs))
        args = (hidden, *rest[0]) if args else ()
        kwargs = rest[1] if args else {**rest[1], "hidden_states": hidden}
        sequence.num_attentions = 0
        if module.training:
            sequence.stream.enter(hidden.device)
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the parts together after the last layer."""
        sequence = self._sequence
        sequence.stream.leave()
        if output is None:  # the layer has raised
            return None
        first = output[0] if isinstance(output, tuple) else output
        is_passed_through = bool(args) and first is args[0]  # a layer of another stage of a pipeline
        if not sequence.num_attentions and not is_passed_through:
            msg = (
                f"'{type(module).__name__}' of {sequence.model_name} does not call its attention through transformers' "
                f"attention interface, so `sequence_parallelism_mode={sequence.mode!r}` would let each part of a "
                "sequence see itself only. Use 'split_gather' with `tp_size`, or a model that does."
            )
            raise ConfigError(msg)
        if not self._is_last or (self._kept is not None and not self._kept.gathers()):
            return output
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        hidden = gather_sequence(hidden, sequence.layout(sequence.length), sequence.group)
        return (hidden, *rest) if isinstance(output, tuple) else hidden


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - transformers' signature
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, from this rank's positions to all ranks'.

    Returns:
        Shape ``(batch, local positions, heads, size)``, and no weights.

    Raises:
        ConfigError: If the model asks for what is not done here.

    Collective: the sequence parallel ranks, also in backward.
    """
    sequence = _split.get(module)
    if sequence is None:
        msg = (
            f"A {type(module).__name__} has `_attn_implementation='{ATTENTION_NAME}'` but is in no model that was "
            "boosted with sequence parallelism; it may be a copy. Set `config._attn_implementation = 'sdpa'`."
        )
        raise ConfigError(msg)
    asked = [name for name in _REFUSED if more.get(name) is not None and more[name] is not False]
    if asked:
        msg = (
            f"{sequence.model_name} asks its attention for '{asked[0]}', which "
            f"`sequence_parallelism_mode={sequence.mode!r}` can't do. Use 'split_gather' with `tp_size`."
        )
        raise ConfigError(msg)
    if key.shape[2] != query.shape[2]:
        msg = (
            f"{sequence.model_name} attends from {query.shape[2]} positions of this rank to {key.shape[2]} others, as "
            "with a cache of keys or another sequence's states, which is not split. Pass neither `past_key_values` nor "
            "`encoder_hidden_states`, and generate without sequence parallelism."
        )
        raise ConfigError(msg)
    sequence.num_attentions += 1
    layout = sequence.layout_of(query.shape[2], attention_mask)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention would, but before anything travels.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    group, options = sequence.group, _Options(scaling=scaling, dropout=dropout)
    if sequence.mode == "ring_attn":
        visibility = Visibility(checked(attention_mask, layout.length), is_causal=causal)
        outputs = ring_attention(query, key, value, visibility, layout, group, **options)
    else:
        mask = whole_mask(attention_mask, layout.length)
        outputs = all_to_all_attention(query, key, value, mask, layout, group, is_causal=causal, **options)
    return outputs.transpose(1, 2).contiguous(), None


def _sequence_dim(value: Tensor, length: int) -> int | None:
    """Return which dimension of a layer's argument runs over whole sequences, by transformers' conventions."""
    if value.dim() in (2, 3) and value.shape[1] == length:
        return 1
    return 0 if value.dim() == 1 and value.shape[0] == length else None


def _check_attention(model: nn.Module, mode: str) -> None:
    if not getattr(model, "_supports_attention_backend", False):
        msg = (
            f"{type(model).__name__} does not call its attention through transformers' attention interface, which is "
            f"where `sequence_parallelism_mode={mode!r}` comes in. Use 'split_gather' with `tp_size`, or a model that "
            "does, such as Llama, Mistral, Qwen, Gemma, GPT-2 or BERT."
        )
        raise ConfigError(msg)


def _check_heads(model: nn.Module, size: int, tensor_size: int) -> None:
    """Check the heads of every tensor parallel rank, so that all ranks raise or none does."""
    from booster_hybrid.tensor_parallel.split import cut_units

    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    units = getattr(config, "num_key_value_heads", None) or heads
    for start, stop in cut_units(units, tensor_size):
        head_ranges((stop - start) * (heads // units), stop - start, size)


def _install_attention(model: nn.Module, sequence: SequenceParallel) -> None:
    """Let a model use our attention, and no other model that shares its configuration."""
    from transformers import PreTrainedConfig
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, make_mask)
    memo: dict[int, Any] = {}
    for module in model.modules():
        _split[module] = sequence
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                own = copy.deepcopy(value, memo)
                own._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - the name by which transformers looks it up
                vars(module)[name] = own
