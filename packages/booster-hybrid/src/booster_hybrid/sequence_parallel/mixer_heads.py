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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.policy.mixers import MIXERS, attribute_of, lengths_of_blocks
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


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
        counts = [attribute_of(module, name) for name in heads.units]
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
        own["_buffers"] = {
            name: None if value is None else self._slice(prefix + name, value)
            for name, value in module._buffers.items()  # noqa: SLF001
        }
        own["_modules"] = {
            name: None if child is None else self._of_this_rank(child, f"{prefix}{name}.")
            for name, child in module._modules.items()  # noqa: SLF001
        }
        for name in (*self._heads.units, *self._heads.sizes):
            path, _, attribute = name.rpartition(".")
            if path == prefix.rstrip(".") and attribute in own:
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
        sizes = lengths_of_blocks(self._module, cut, value.shape[cut.dim])
        parts = [each.chunk(size, cut.dim)[rank] for each in torch.split(value, [*sizes], cut.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def _is_watched(module: nn.Module) -> bool:
    """Return whether something hangs on the modules inside of a part: hooks, adapters, other forwards."""
    return any(
        "forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks  # noqa: SLF001 - torch tells nobody
        for each in module.modules()
        if each is not module
    )
