"""Linear attention, state spaces and short convolutions by heads: each rank computes some heads of whole sequences.

The recurrences and convolutions of such a part of a layer run over positions, but each head (or group of heads, or
channel) by itself. So a rank is given whole sequences, computes its heads with its slices of the part's weights, and
what ranks return is summed over the output projection, and cut to each rank's positions: the work and the activations
of a part are shared out, as DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509) shares out those of attention.
Weights stay whole on each rank, whose gradient is that of its heads: the mean over sequence parallel ranks, which all
weights take, makes it the whole one.

The model's own code runs, in a copy of the part that counts fewer heads; `MIXERS` says what is counted in each class.
`boost` compares what comes out with whole sequences, as for all layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


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
        units: Attributes that count what is left whole: heads, groups of heads. Each rank must get as many as another.
        sizes: Further attributes to divide by the number of ranks; of the parts inside, by their dotted names.
        cuts: The parameters that have a slice for each rank, by name.
        first: Parameters that the first rank alone uses: what is added to the sum over ranks once.
        whole: Parameters that all heads share.
    """

    units: tuple[str, ...]
    sizes: tuple[str, ...]
    cuts: Mapping[str, Cut]
    first: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


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
_MAMBA2 = HeadsOfMixer(  # the gated norm is over groups
    ("n_groups", "num_heads"),
    ("intermediate_size", "conv_dim"),
    {
        "in_proj.weight": _MAMBA2_PROJECTED,
        "in_proj.bias": _MAMBA2_PROJECTED,
        "conv1d.weight": _MAMBA2_CONVOLVED,
        "conv1d.bias": _MAMBA2_CONVOLVED,
        **dict.fromkeys(("dt_bias", "A_log", "D", "norm.weight"), _ROWS),
        "out_proj.weight": _COLUMNS,
    },
    first=("out_proj.bias",),
)
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
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer", "BambaMixer", "GraniteMoeHybridMambaLayer"), _MAMBA2),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _SHORT_CONVOLUTION),
}
"""By the names of classes of transformers."""
_CACHES = ("cache_params", "past_key_values")


class ForwardOfHeads:
    """The forward of a part of a layer that mixes positions: that of this rank's heads, where these can be told.

    Args:
        module: The part.
        group: The sequence parallel ranks.

    Attributes:
        is_partial: Whether what was returned last is this rank's term of a sum over ranks, and not the whole.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self._module, self._group = module, group
        self._heads = MIXERS[type(module).__name__]
        self.is_partial = False

    @classmethod
    def of(cls, module: nn.Module, group: RankGroup) -> ForwardOfHeads | None:
        """Return the forward of a part whose heads can be shared out among ranks, which becomes its own."""
        heads = MIXERS.get(type(module).__name__)
        if heads is None or group.size == 1 or "forward" in vars(module):
            return None
        known = {*heads.cuts, *heads.first, *heads.whole}
        counts = [_attribute(module, name) for name in heads.units]
        if not {name for name, _ in module.named_parameters()} <= known or any(each % group.size for each in counts):
            return None
        forward = cls(module, group)
        module.forward = forward
        return forward

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code on this rank's heads, or on all of them."""
        module = self._module
        self.is_partial = all(kwargs.get(name) is None for name in _CACHES) and not _is_watched(module)
        if not self.is_partial:  # a cache would hold some heads; hooks and adapters are those of the whole part
            return type(module).forward(module, *args, **kwargs)
        here = self._of_this_rank(module, "")
        return type(module).forward(here, *args, **kwargs)

    def _of_this_rank(self, module: nn.Module, prefix: str) -> nn.Module:
        """Return a copy of a module with this rank's heads."""
        here = copy.copy(module)
        own: dict[str, Any] = vars(here)
        own.pop("forward", None)
        own["_parameters"] = {
            name: None if value is None else self._slice(prefix + name, value)
            for name, value in module._parameters.items()  # noqa: SLF001 - a slice is no parameter of its own
        }
        own["_modules"] = {
            name: None if child is None else self._of_this_rank(child, f"{prefix}{name}.")
            for name, child in module._modules.items()  # noqa: SLF001
        }
        for name in (*self._heads.units, *self._heads.sizes):
            path, _, attribute = name.rpartition(".")
            if path == prefix.rstrip("."):
                own[attribute] //= self._group.size
        if isinstance(here, nn.Conv1d):
            own.update({name: own[name] // self._group.size for name in ("in_channels", "out_channels")})
            own["groups"] = own["in_channels"]
        return here

    def _slice(self, name: str, value: Tensor) -> Tensor | None:
        """Return this rank's slice of a parameter; ``None`` for what another rank uses alone."""
        rank, size = self._group.rank, self._group.size
        if name in self._heads.first:
            return value if rank == 0 else None
        cut = self._heads.cuts.get(name)
        if cut is None:
            return value
        if isinstance(cut.blocks, int):
            sizes = [value.shape[cut.dim] // cut.blocks] * cut.blocks
        else:
            sizes = [_product(self._module, names) for names in cut.blocks]
        parts = [each.chunk(size, cut.dim)[rank] for each in torch.split(value, sizes, cut.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def _attribute(module: nn.Module, name: str) -> int:
    path, _, attribute = name.rpartition(".")
    return int(getattr(module.get_submodule(path), attribute))


def _product(module: nn.Module, names: tuple[str, ...]) -> int:
    found = 1
    for name in names:
        found *= _attribute(module, name)
    return found


def _is_watched(module: nn.Module) -> bool:
    """Return whether something hangs on the modules inside of a part: hooks, adapters, other forwards."""
    return any(
        "forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks  # noqa: SLF001 - torch tells nobody
        for each in module.modules()
        if each is not module
    )
