"""Outputs of a whole module that each tensor parallel rank uses for its own heads.

Latent attention projects hidden states to a latent vector and to the rotary part of the keys, in one layer. The vector
goes through column-parallel layers, which sum its gradient. The rotary part goes to the heads as it is, so that each
rank has the gradient of its own heads alone.
Reference: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.tensor_parallel.collectives import enter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_hybrid.layer_plan import ModulePatches
    from booster_hybrid.rank_group import RankGroup


class SummedFeatures:
    """Sums the gradient of a module's last outputs over ranks.

    Args:
        module: The module, which returns a tensor.
        number: How many outputs.
        group: The ranks.
        changes: Notes the hook.
    """

    def __init__(self, module: nn.Module, number: int, group: RankGroup, changes: ModulePatches) -> None:
        self.module, self.group = module, group
        self._number = number
        changes.hook(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the outputs, of which the last ones sum their gradient.

        Collective: the ranks, in backward.
        """
        del module, args
        if self.group.size == 1:
            return output
        others, own = output[..., : -self._number], output[..., -self._number :]
        (entered,) = enter((own,), self.group)
        return torch.cat([others, entered], -1)
