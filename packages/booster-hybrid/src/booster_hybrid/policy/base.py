"""`ShardingPolicy` and `ModuleRule`: how a model is split, said as data.

A policy for a model of one's own is a list of rules::

    ShardingPolicy(
        rules=(
            ModuleRule("blocks.*.attention.qkv", Style.COLUMN, units="num_heads", num_blocks=3),
            ModuleRule("blocks.*.attention.out", Style.ROW, units="num_heads"),
            ModuleRule("blocks.*.mlp.up", Style.COLUMN),
            ModuleRule("blocks.*.mlp.down", Style.ROW),
        ),
        layers=("blocks",),
    )
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


WHOLE_SEQUENCES = "whole_sequences"


def matches(pattern: str, name: str) -> bool:
    """Return whether a dotted name fits a rule's pattern.

    Args:
        pattern: Such as ``"layers.*.mlp"``, ``"**.mlp"`` or ``"language_model.**.mlp"``.
        name: Such as ``"layers.3.mlp"``.
    """
    return _fits(pattern.split("."), name.split("."))


def _fits(ours: list[str], theirs: list[str]) -> bool:
    if not ours:
        return not theirs
    if ours[0] == "**":
        return any(_fits(ours[1:], theirs[start:]) for start in range(len(theirs) + 1))
    return bool(theirs) and ours[0] in ("*", theirs[0]) and _fits(ours[1:], theirs[1:])


class Style(enum.Enum):
    """How one module is split over tensor parallel ranks."""

    COLUMN = "column"
    """A linear layer holds some of its outputs; what follows works on those."""
    COLUMN_GATHER = "column_gather"
    """A linear layer holds some of its outputs, which are put together again."""
    ROW = "row"
    """A linear layer holds some of its inputs, which come split; its outputs are summed."""
    ROW_SPLIT = "row_split"
    """A linear layer holds some of its inputs, of which it takes its part; its outputs are summed."""
    VOCABULARY = "vocabulary"
    """An embedding holds some rows."""
    HEAD = "head"
    """A linear layer from hidden states to the vocabulary holds some logits."""
    EXPERTS = "experts"
    """A mixture of experts, each expert split: (hidden states, expert indices, weights) in, partial sums out."""
    SUMMED_GRADIENT = "summed_gradient"
    """A module or parameter is whole on every rank, but works on split activations: its gradients are summed."""
    SUMMED_FEATURES = "summed_features"
    """A module is whole on every rank, but some of its outputs go to each rank's heads: their gradient is summed."""
    PARAMETER = "parameter"
    """A parameter outside of a linear layer is cut along the rule's ``dim``; nothing is communicated."""
    ARGUMENT = "argument"
    """A module is called with tensors that have a part for each unit (head), named by the rule: it gets its own."""
    MIXER = "mixer"
    """A part of a layer that mixes positions by heads, whose parameters have rules of their own; see `MIXERS`."""


@dataclass(frozen=True)
class ModuleRule:
    """How the modules (or parameters) of a pattern are split.

    Args:
        pattern: Name of a module or parameter; ``*`` stands for one component, such as a layer's number, and ``**``
            for any number of them.
        style: How it is split.
        units: Where the split dimension must not be cut: the name of a field of the model's configuration, or of an
            attribute of the module's parent, that holds the number of its indivisible parts (heads), or that number.
            ``None`` cuts anywhere. For `Style.SUMMED_FEATURES`: how many of the last outputs.
        groups: What counts the groups of units that need the same key/value head, as ``units`` does; ``None`` where
            each unit is a group. A group is left on one rank where there are as many groups as ranks, else the units of
            a group go to several.
        is_shared: Several ranks may hold the units, where there are fewer groups than ranks: keys and values. Their
            gradients are summed.
        num_blocks: Equal blocks of which the split dimension consists, such as 3 for fused q/k/v.
        blocks: The units of each block, where they differ: queries first, and then keys and values, which are shared
            as ``is_shared`` says. Stands for ``units`` and ``num_blocks``.
        lengths: Lengths of the blocks of which the split dimension consists, where these differ and each has all
            units. Stands for ``num_blocks``.
        scaled: Attributes of the module's parent that count what is split (``"num_heads"``), to be set to what is
            here.
        local_width: Whether the parent's forward takes the width of what is split from that of its first tensor, as in
            ``view(B, T, C)``. It then gets a tensor as wide as what is here, without values, and the layer the real
            one: for `Style.COLUMN`.
        per_group: Attributes of the module's parent, if it has them, that count the units of a group.
        shares_input: Whether the layer may read the same input as its column-parallel siblings, and share a sum.
        is_optional: Whether a model without such a module is fine.
        yields: Whether the rules after it hold where there are fewer units than ranks.
        dim: For `Style.PARAMETER`: the dimension to cut, which may be negative.
        arguments: For `Style.ARGUMENT`: names of the tensors, whose second dimension counts units, or the first of a
            three-dimensional one with all samples' units in a row.
    """

    pattern: str
    style: Style
    units: str | int | None = None
    groups: str | int | None = None
    is_shared: bool = False
    num_blocks: int = 1
    blocks: tuple[str | int, ...] = ()
    lengths: tuple[int, ...] = ()
    scaled: tuple[str, ...] = ()
    per_group: tuple[str, ...] = ()
    local_width: bool = False
    shares_input: bool = True
    is_optional: bool = False
    yields: bool = False
    dim: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertRule:
    """Which modules are experts that expert parallelism may spread over ranks.

    Args:
        pattern: Name of a module, as for `ModuleRule`. Its forward is called with hidden states of shape
            ``(tokens, width)``, the experts that each token chooses, ``(tokens, top_k)``, and their weights.
        parameters: Names of its parameters whose first dimension is the experts'; all that are its own by default.
        counts: Attributes of the module, if it has them, that count its experts, to be set to how many are here.
        takes_every_token: Whether its forward is called with hidden states alone, of shape ``(experts * tokens,
            width)``: every token for the first expert, for the second, and so on. Rows of zeros, which come from tokens
            that have not chosen an expert, must give zeros.
    """

    pattern: str
    parameters: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    takes_every_token: bool = False


@dataclass(frozen=True)
class ShardingPolicy:
    """How one model class is split.

    Args:
        rules: Rules of tensor parallelism; the first that matches a module holds.
        layers: Names of the lists of layers between which a pipeline may be cut, in the order in which they run.
        options: Further facts that other axes read, by name: under `WHOLE_SEQUENCES`, the lists of layers whose
            sequences are not to be split.
        experts: Modules of experts, for `ep_size`; where there are none, those of the plan that a model of transformers
            carries.
    """

    rules: tuple[ModuleRule, ...] = ()
    layers: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    experts: tuple[ExpertRule, ...] = ()

    @property
    def whole_sequences(self) -> tuple[str, ...]:
        """Lists of layers whose sequences are not to be split over ranks."""
        names: Any = self.options.get(WHOLE_SEQUENCES, ())
        return tuple(names)
