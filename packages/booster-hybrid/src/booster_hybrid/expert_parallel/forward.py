"""What a module of experts does in the place of its own forward when they are spread over ranks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_hybrid.expert_parallel.exchange import combine, dispatch, find_route, without_rows
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_hybrid.rank_group import RankGroup

_ARGUMENTS = 3
"""Hidden states, the experts that each token chooses, and their weights."""


class ExpertsForward:
    """Sends tokens to their experts, lets the module's own forward run there, and brings the results back.

    The module is called with rows of one choice each, and counts its experts from 0. Outputs travel in the format of
    the hidden states.

    Args:
        module: The experts that are here.
        name: What errors call it.
        num_experts: Number of experts on all ranks.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, name: str, num_experts: int, group: RankGroup) -> None:
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._module, self._name, self._num_experts, self._group = module, name, num_experts, group

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of each token's experts, weighted and added up.

        Raises:
            ConfigError: If it is called otherwise than by hidden states, indices and weights.

        Collective: the expert parallel ranks.
        """
        given = self._signature.bind(*args, **kwargs).args
        if len(given) != _ARGUMENTS or given[0].dim() != given[1].dim() or given[1].shape != given[2].shape:
            shapes = ", ".join(str(tuple(each.shape)) if hasattr(each, "shape") else repr(each) for each in given)
            msg = (
                f"The experts '{self._name}' were called with {shapes}. Expert parallelism needs hidden states "
                "(tokens, width), indices (tokens, top_k) and weights (tokens, top_k). Use `ep_size=1` for this model."
            )
            raise ConfigError(msg)
        hidden, index, weights = given
        route = find_route(index, self._num_experts, self._group)
        rows, of_rows = dispatch(route, self._group, hidden, weights)
        if rows.shape[0]:
            results = self._forward(rows, route.local_experts.unsqueeze(1), of_rows).to(rows.dtype)
        else:
            adapted = [getattr(self._module, name) for name in getattr(self._module, "parametrizations", ())]
            results = without_rows(rows, of_rows, [*self._module.parameters(), *adapted])
        return combine(results, hidden.shape[0], route, self._group)


class EveryTokenForward(ExpertsForward):
    """The same for experts that are called with every token, and with zeros for those that have not chosen an expert.

    Rows of zeros stay where they are. The rows of each expert that is here are filled up with zeros to as many as the
    one with the most has.
    """

    @outside_of_graphs
    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the output of every token's row.

        Args:
            hidden: Shape ``(experts * tokens, width)``.

        Raises:
            ConfigError: If it has another shape.

        Collective: the expert parallel ranks.
        """
        if hidden.dim() != 2 or hidden.shape[0] % self._num_experts:
            msg = (
                f"The experts '{self._name}' were called with {tuple(hidden.shape)}. Expert parallelism needs hidden "
                f"states of every token for each of {self._num_experts} experts. Use `ep_size=1` for this model."
            )
            raise ConfigError(msg)
        experts = torch.arange(self._num_experts, device=hidden.device)
        experts = experts.repeat_interleave(hidden.shape[0] // self._num_experts)
        chosen = experts.masked_fill(~hidden.detach().any(-1), self._num_experts)
        route = find_route(chosen.unsqueeze(1), self._num_experts, self._group)
        (rows,) = dispatch(route, self._group, hidden)
        counts = torch.bincount(route.local_experts, minlength=self._num_experts // self._group.size)
        most = max(route.most_rows, 1)  # one row of zeros keeps experts without rows in the graph
        by_expert = torch.sort(route.local_experts, stable=True).indices
        begins = torch.cumsum(counts, 0) - counts
        own = torch.arange(len(by_expert), device=hidden.device)
        sorted_experts = route.local_experts[by_expert]
        places = torch.empty_like(by_expert)
        places[by_expert] = sorted_experts * most + own - begins[sorted_experts]
        filled = rows.new_zeros((len(counts) * most, rows.shape[1])).index_copy(0, places, rows)
        results = self._forward(filled).to(rows.dtype).index_select(0, places)
        return combine(results, hidden.shape[0], route, self._group)
