"""The lists of layers along which sequences are split, and what can't be asked of it then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.trace import CONTAINERS, is_plain_output, shown_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from booster_hybrid.probe.lengths import Lengths
    from booster_hybrid.sequence_parallel.layout import SequenceLayout


def lists_of_layers(model: nn.Module, lists: Sequence[str], mode: str) -> list[list[nn.Module]]:
    """Return the layers of a model, in the order in which they run: one list, or an encoder's and a decoder's.

    Args:
        model: The user's model.
        lists: Names of lists of layers; those that it lacks are passed over.
        mode: The mode of sequence parallelism, for messages.

    Raises:
        ConfigError: If there is none, or layers may be skipped.
    """
    modules = dict(model.named_modules())
    found = [[*modules[name].children()] for name in lists if isinstance(modules.get(name), CONTAINERS)]
    if not found:
        msg = (
            f"`sequence_parallelism_mode={mode!r}` splits sequences along lists of layers, but the policy of "
            f"{type(model).__name__} names none of the model's. Leave sequences whole for this model, or pass "
            "`custom_policy=ShardingPolicy(layers=['model.layers'])` with the name of its list."
        )
        raise ConfigError(msg)
    config = getattr(model, "config", None)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        dropped = getattr(config, name, 0.0)
        if dropped:
            msg = f"`{name}={dropped}` skips layers at random, also the first, where sequences are split. Set it to 0."
            raise ConfigError(msg)
    return found


def check_lengths(model_name: str, mode: str, known: Lengths | None, samples: int, layout: SequenceLayout) -> None:
    """Raise if it is not known whether layers compute the same from parts of sequences of a length.

    Args:
        model_name: Class of the model, for messages.
        mode: The mode of sequence parallelism, for messages.
        known: For which lengths that is known; ``None`` where that does not matter.
        samples: Number of samples.
        layout: How the sequences are split.

    Raises:
        ConfigError: If not, on every rank.
    """
    doubt = None if known is None else known.doubt(samples, layout.length, layout.lengths)
    if doubt is not None:
        remedy = (
            "Leave `sequence_parallelism_mode` out for this model"
            if mode == "split_gather"
            else "Pass `HybridParallelPlugin(example_batch=...)` with a batch of that length, which `boost` compares"
        )
        msg = (
            f"{model_name} was given sequences of {layout.length} positions, and it is not known whether its layers "
            f"compute the same from parts of these (`sequence_parallelism_mode={mode!r}`): {doubt}. {remedy}; "
            "`unchecked='allow'` trusts the model instead."
        )
        raise ConfigError(msg)


def check_layer_output(layer: nn.Module, output: Any) -> None:
    """Raise if a layer's hidden states can't be found in what it returned.

    Raises:
        ConfigError: If it is no tensor, or plain tuple that begins with one.
    """
    if not is_plain_output(output):
        msg = (
            f"A layer of class `{type(layer).__name__}` returns a {shown_output(output)}. Where sequences are split, "
            "layers must return a tensor, or a plain tuple of which the first entry is one. Return one of these, or "
            "leave `sequence_parallelism_mode` out."
        )
        raise ConfigError(msg)


def refuse_outputs_of_layers(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse, before a forward, what the layers have in between, of which each rank has a part.

    Raises:
        ConfigError: If it is asked for.
    """
    del args
    config = getattr(module, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(name)
        if asked or (asked is None and getattr(config, name, False)):
            msg = (
                f"`{name}=True` asks for what the layers have in between, of which each rank has a part. Leave it out."
            )
            raise ConfigError(msg)
