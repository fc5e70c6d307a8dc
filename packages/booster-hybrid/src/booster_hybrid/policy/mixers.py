"""Which parts of layers mix positions by heads: linear attention, state spaces and short convolutions of transformers.

The recurrences and convolutions of such a part run over positions, but each head (or group of heads, or channel) by
itself, so that ranks may share heads out: with weights that are cut for good, as tensor parallelism does by
`rules_of_mixers`, or for one forward, as between the ranks of a sequence (see `sequence_parallel.mixer_heads`). The
model's own code runs on fewer heads either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from booster_hybrid.modules import ModuleNames
from booster_hybrid.policy.base import ModuleRule, Style

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class Cut(NamedTuple):
    """How a parameter is cut to a rank's heads.

    Args:
        dim: The dimension that runs over heads.
        blocks: Attributes of the part whose products are the sizes of the blocks of which the dimension consists, each
            with all heads; empty for one block. An integer: as many equal blocks.
    """

    dim: int = 0
    blocks: tuple[tuple[str, ...], ...] | int = 1


@dataclass(frozen=True)
class HeadsOfMixer:
    """What a class of mixers counts by heads.

    Args:
        units: Attributes that count what is left whole, the most coarse first: groups of heads, heads.
        sizes: Further attributes to divide by the number of ranks; of the parts inside, by their dotted names.
        cuts: The parameters and buffers that have a slice for each rank, by name.
        first: Parameters that the first rank alone uses: what is added to the sum over ranks once.
        whole: Parameters that all heads share.
        has_shortcut: Whether a kernel may stand for all of the part in training, its projection of outputs included.
    """

    units: tuple[str, ...]
    sizes: tuple[str, ...]
    cuts: Mapping[str, Cut]
    first: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    has_shortcut: bool = False

    def counted_in(self, path: str) -> tuple[str, ...]:
        """Return the attributes to divide of the module that has a dotted name in the part."""
        found = (name.rpartition(".") for name in (*self.units, *self.sizes))
        return tuple(attribute for owner, _, attribute in found if owner == path)


_ROWS, _COLUMNS = Cut(), Cut(1)
_KEYS_AND_VALUES = Cut(0, (("key_dim",), ("key_dim",), ("value_dim",)))
_STATES = ("n_groups", "ssm_state_size")
_DELTA = {"conv1d.weight": _KEYS_AND_VALUES, "dt_bias": _ROWS, "A_log": _ROWS}
_DELTA_UNITS, _DELTA_SIZES = ("num_k_heads", "num_v_heads"), ("key_dim", "value_dim", "conv_dim")
_QWEN3_5 = HeadsOfMixer(
    _DELTA_UNITS,
    _DELTA_SIZES,
    {
        **_DELTA,
        "in_proj_qkv.weight": _KEYS_AND_VALUES,
        **dict.fromkeys(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"), _ROWS),
        "out_proj.weight": _COLUMNS,
    },
    whole=("norm.weight",),
)
_MAMBA2_CONVOLVED = Cut(0, (("intermediate_size",), _STATES, _STATES))
_MAMBA2_PROJECTED = Cut(0, (("intermediate_size",), ("intermediate_size",), _STATES, _STATES, ("num_heads",)))
_MAMBA2_CUTS = {
    "in_proj.weight": _MAMBA2_PROJECTED,
    "in_proj.bias": _MAMBA2_PROJECTED,
    "conv1d.weight": _MAMBA2_CONVOLVED,
    "conv1d.bias": _MAMBA2_CONVOLVED,
    **dict.fromkeys(("dt_bias", "A_log", "D", "norm.weight"), _ROWS),  # the gated norm is over groups
    "out_proj.weight": _COLUMNS,
}
_MAMBA2_UNITS, _MAMBA2_SIZES = ("n_groups", "num_heads"), ("intermediate_size", "conv_dim")
_MAMBA2 = HeadsOfMixer(_MAMBA2_UNITS, _MAMBA2_SIZES, _MAMBA2_CUTS, first=("out_proj.bias",), has_shortcut=True)
_SHORT_CONVOLUTION = HeadsOfMixer(
    ("conv.groups",),
    (),
    {
        "in_proj.weight": Cut(0, 3),
        "in_proj.bias": Cut(0, 3),
        "conv.weight": _ROWS,
        "conv.bias": _ROWS,
        "out_proj.weight": _COLUMNS,
    },
    first=("out_proj.bias",),
)
MIXERS: dict[str, HeadsOfMixer] = {
    "Qwen3NextGatedDeltaNet": HeadsOfMixer(
        _DELTA_UNITS,
        _DELTA_SIZES,
        {
            **_DELTA,
            **dict.fromkeys(("in_proj_qkvz.weight", "in_proj_ba.weight"), _ROWS),  # by key heads
            "out_proj.weight": _COLUMNS,
        },
        whole=("norm.weight",),
    ),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"), _QWEN3_5),
    "OlmoHybridGatedDeltaNet": HeadsOfMixer(
        _DELTA_UNITS,
        _DELTA_SIZES,
        {
            **_DELTA,
            **dict.fromkeys((f"{each}_proj.weight" for each in "qkvabg"), _ROWS),
            "o_proj.weight": _COLUMNS,
        },
        whole=("o_norm.weight",),
    ),
    "KimiLinearDeltaAttention": HeadsOfMixer(
        ("num_heads", "forget_gate.num_heads"),
        ("qkv_dim", "conv_dim", "forget_gate.qkv_dim"),
        {
            **dict.fromkeys((f"{each}_proj.weight" for each in ("q", "k", "v", "b", "g_b")), _ROWS),
            "conv1d.weight": Cut(0, 3),
            "forget_gate.f_b_proj.weight": _ROWS,
            "forget_gate.dt_bias": _ROWS,
            "forget_gate.A_log": Cut(2),
            "o_proj.weight": _COLUMNS,
        },
        whole=("g_a_proj.weight", "forget_gate.f_a_proj.weight", "o_norm.weight"),
    ),
    **dict.fromkeys(
        ("Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer", "BambaMixer", "GraniteMoeHybridMambaLayer"), _MAMBA2
    ),
    "FalconH1Mixer": HeadsOfMixer(
        _MAMBA2_UNITS,
        (*_MAMBA2_SIZES, "groups_time_state_size", "norm.n_groups"),
        {**_MAMBA2_CUTS, "mup_vector": Cut(2, _MAMBA2_PROJECTED.blocks)},
        first=("out_proj.bias",),
        has_shortcut=True,
    ),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _SHORT_CONVOLUTION),
}
"""By the names of classes of transformers."""

_CHANNELS = ("in_channels", "out_channels", "groups")


def attribute_of(module: nn.Module, name: str) -> int:
    """Return a number that a part of a layer, or a module in it, has under a dotted name."""
    path, _, attribute = name.rpartition(".")
    return int(getattr(module.get_submodule(path), attribute))


def lengths_of_blocks(module: nn.Module, cut: Cut, length: int) -> tuple[int, ...]:
    """Return the lengths of the blocks of which a dimension consists.

    Args:
        module: The part of a layer.
        cut: How it is cut.
        length: The dimension's.
    """
    if isinstance(cut.blocks, int):
        return (length // cut.blocks,) * cut.blocks
    return tuple(math.prod(attribute_of(module, name) for name in names) for names in cut.blocks)


def rules_of_mixers(model: nn.Module) -> list[ModuleRule]:
    """Return rules that give each tensor parallel rank some heads of such parts, where these are enough.

    Args:
        model: The user's model.
    """
    names = ModuleNames(model)
    rules: list[ModuleRule] = []
    for name, module in names.modules.items():
        heads = MIXERS.get(type(module).__name__)
        if heads is not None:
            inside = {
                key[len(name) + 1 :]: value for key, value in names.parameters.items() if key.startswith(f"{name}.")
            }
            if inside.keys() <= {*heads.cuts, *heads.first, *heads.whole}:
                rules += _rules(name, module, heads, inside)  # others may have layers of the same names in other layers
    return rules


def _rules(prefix: str, module: nn.Module, heads: HeadsOfMixer, inside: Mapping[str, Tensor]) -> Iterator[ModuleRule]:
    counted = attribute_of(module, heads.units[0])

    def rule(name: str, style: Style, **options: Any) -> ModuleRule:
        path = name.rpartition(".")[0]
        owner = module.get_submodule(path)
        names = (*heads.counted_in(path), *(_CHANNELS if isinstance(owner, nn.Conv1d) else ()))
        scaled = tuple(each for each in dict.fromkeys(names) if hasattr(owner, each))
        return ModuleRule(f"{prefix}.{name}", style, counted, yields=True, is_optional=True, scaled=scaled, **options)

    if heads.has_shortcut:
        yield ModuleRule(prefix, Style.MIXER, counted, yields=True, is_optional=True)
    for name, value in inside.items():
        cut = heads.cuts.get(name)
        if cut is None:
            if name in heads.whole and value.dim() == 1:  # what others compute enters the layers that are cut
                yield rule(name, Style.SUMMED_GRADIENT)
            continue
        lengths = lengths_of_blocks(module, cut, value.shape[cut.dim])
        owner, _, attribute = name.rpartition(".")
        if attribute == "weight" and value.dim() == 2:  # linear layers, with their biases
            style = Style.COLUMN if cut.dim == 0 else Style.ROW
            yield rule(owner, style, lengths=lengths if style is Style.COLUMN else ())
        elif f"{owner}.weight" not in inside or inside[f"{owner}.weight"].dim() != 2:
            yield rule(name, Style.PARAMETER, dim=cut.dim, lengths=lengths)
