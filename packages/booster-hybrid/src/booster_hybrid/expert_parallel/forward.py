"""`ExpertsForward`: what a module of experts does in the place of its own forward when they are spread over ranks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.expert_parallel.exchange import combine, dispatch, find_route, without_rows
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_hybrid.tensor_parallel.group import TensorGroup

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

    def __init__(self, module: nn.Module, name: str, num_experts: int, group: TensorGroup) -> None:
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
        rows, of_rows = dispatch(hidden, weights, route, self._group)
        if rows.shape[0]:
            results = self._forward(rows, route.local_experts.unsqueeze(1), of_rows).to(rows.dtype)
        else:
            results = without_rows(rows, of_rows, [*self._module.parameters()])
        return combine(results, hidden.shape[0], route, self._group)
