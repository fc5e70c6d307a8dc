"""`PointwiseProbe`: find out in the first forward whether a module looks at each position of a sequence by itself.

Between blocks a rank has some positions of each sequence. A norm or a dropout works on these as on all, but a
convolution or an attention would miss the others, without an error. So the module is run on random values, and again
with the first or the last position changed: outputs at other positions must stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from booster_hybrid.rank_group import RankGroup

_TOLERANCE = 1e-3
"""Largest change at another position, relative to the largest output."""
_SEED = 20191


class PointwiseProbe:
    """Checks one module in its first call, and raises on all ranks if it mixes positions.

    Args:
        module: The module, which has no submodules; it gets a hook that removes itself.
        name: What errors call it.
        num_here: Returns the number of positions on this rank.
        group: The ranks that share out sequences.
    """

    def __init__(self, module: nn.Module, name: str, num_here: Callable[[], int], group: RankGroup) -> None:
        self._name, self._num_here, self._group = name, num_here, group
        self._handle = module.register_forward_pre_hook(self, with_kwargs=True)

    @outside_of_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Probe the module with inputs of the shapes that it is given.

        Raises:
            ConfigError: If it mixes positions, on every rank.

        Collective: the group.
        """
        num_here = self._num_here()
        can_tell = num_here > 1
        device = next(each.device for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        mixes = can_tell and _mixes_positions(module, args, kwargs, num_here, device)
        flags = torch.tensor([float(mixes), float(can_tell)], device=device)
        self._group.all_reduce(flags).wait()
        is_mixing, is_known = (bool(each) for each in flags.tolist())
        if is_known:
            self._handle.remove()
        if is_mixing:
            msg = (
                f"{self._name} mixes positions of a sequence, and 'split_gather' leaves each rank only some of them "
                "there. Wrap it in a module that the policy splits or that has submodules, which gets whole "
                "sequences, or use 'all_to_all' or 'ring_attn' with `sp_size`."
            )
            raise ConfigError(msg)


def _mixes_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_here: int, device: torch.device
) -> bool:
    """Return whether an output of a module depends on inputs at other positions."""
    flat, form = pytree.tree_flatten((args, kwargs))
    dims = {index: dim for index, each in enumerate(flat) if (dim := _position_dim(each, num_here)) is not None}
    if not dims:
        return False
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    is_host = device.type == "cpu"
    kept = torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)
    with kept, torch.no_grad():
        torch.manual_seed(_SEED)
        values = [torch.randn_like(each) if index in dims else each for index, each in enumerate(flat)]
        changed_values = {index: torch.randn_like(values[index]) for index in dims}

        def run(position: int | None) -> Tensor | None:
            given = list(values)
            for index, dim in dims.items() if position is not None else ():
                given[index] = values[index].clone()
                given[index].select(dim, position).copy_(changed_values[index].select(dim, position))  # type: ignore[arg-type]
            torch.manual_seed(_SEED)  # what is dropped is the same
            args, kwargs = pytree.tree_unflatten(given, form)
            output = module.forward(*args, **kwargs)
            return next((each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor)), None)

        try:
            expected, *changed = (run(position) for position in (None, 0, num_here - 1))
        finally:
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    if expected is None or (dim := _position_dim(expected, num_here)) is None:
        return True
    bound = _TOLERANCE * float(expected.abs().max())
    for first_other, output in enumerate(reversed(changed)):  # all but the last position, all but the first
        assert output is not None, "a module returns a tensor in each call"
        difference = (output - expected).narrow(dim, first_other, num_here - 1)
        if float(difference.abs().max()) > bound:
            return True
    return False


def _position_dim(value: Any, num_here: int) -> int | None:
    """Return which dimension of a floating tensor runs over a rank's positions; ``None`` where none does."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    return next((dim for dim in (1, *range(2, value.dim())) if value.shape[dim] == num_here), None)
