"""DoRA on split layers: magnitudes scale whole rows, whose norms are computed from this rank's parts.

A row of a layer's weight makes one output. On a column-parallel layer rows are whole, and their magnitudes are split as
the outputs are; on a row-parallel layer the squares of the ranks' parts are summed, and magnitudes are whole.
Reference: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation" (arXiv:2402.09353).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.whole_tensors import summed

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


class SplitMagnitude:
    """Stands in for what peft's DoRA takes of whole weights, and of inputs outside of the layer.

    Args:
        dora: peft's module that holds the magnitudes of one adapter.
        name: The layer, for messages.
        group: The tensor parallel ranks.
        is_partial: Whether each rank has a part of every row.

    Raises:
        ConfigError: If this version of peft computes the adapter's weight elsewhere.
    """

    def __init__(self, dora: Any, name: str, group: TensorGroup, *, is_partial: bool) -> None:
        if not hasattr(dora, "get_lora_weight"):
            msg = (
                f"'{name}' has adapters with `use_dora=True` on a layer that `tp_size={group.size}` splits, which "
                "needs a newer peft. Run `pip install -U peft`, or leave out `use_dora`."
            )
            raise ConfigError(msg)
        self._dora, self._group, self._is_partial = dora, group, is_partial
        self._forward = dora.forward
        dora.forward, dora.get_lora_weight, dora.get_weight_norm = self, self.product, self.norms

    def __call__(self, source: Tensor, *, base_layer: Any, base_result: Tensor | None = None, **more: Any) -> Tensor:
        """Return what DoRA adds to a layer's outputs.

        Collective: the group, where the layer or the adapter sends something.
        """
        if base_result is None:  # inputs were dropped: peft would multiply by the weight, and send nothing
            base_result = base_layer(source)
        result: Tensor = self._forward(source, base_layer=base_layer, base_result=base_result, **more)
        return result

    def product(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:  # noqa: N803 - peft's
        """Return the part of the adapter's weight that belongs to the layer's."""
        del adapter_name
        weight: Tensor = lora_B.weight @ lora_A.weight
        return weight

    def norms(self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        """Return the norms of the rows, each over all of its parts; they are constants to backward.

        Collective: the group, where rows are split.
        """
        del adapter_name
        with torch.no_grad():
            rows = (weight.t() if self._dora.fan_in_fan_out else weight) + scaling * lora_weight
            squares = rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(1)
            if self._is_partial:
                squares = summed(squares, self._group)
            return squares.sqrt().to(weight.dtype)
