"""Attention under a rule of who may see whom, such as packed documents, by torch's `flex_attention`.

Its compiled kernel asks the rule for the scores that it computes, and skips the blocks that nobody sees: one call for
all that this rank's queries see of another's keys, whatever the positions of both in the whole sequence.
Reference: Dong et al. 2024, "Flex Attention" (arXiv:2412.05496).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.mask import Block

_SIZES = range(16, 257)
"""Sizes of heads that its kernels are made for."""


@functools.lru_cache
def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `create_block_mask` and `flex_attention`, compiled once for the whole process."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(create_block_mask), torch.compile(flex_attention)


def takes_rules(query: Tensor, value: Tensor) -> bool:
    """Return whether a device has a kernel that attends by a rule; elsewhere rules are made masks of tiles.

    Args:
        query: The queries.
        value: The values.
    """
    is_there = query.device.type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None
    is_narrow = query.dtype in (torch.bfloat16, torch.float16)
    return is_there and is_narrow and query.shape[-1] in _SIZES and value.shape[-1] in _SIZES


def make_block_mask(
    rule: Callable[..., Tensor],
    shape: tuple[int, int],
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    device: torch.device,
) -> Any:
    """Return what the kernel is told of who may see whom.

    Args:
        rule: Whether a query may see a key, given sample, head and the positions of both in the whole sequence.
        shape: Numbers of samples and of heads between which the rule differs.
        queries: Ranges of the positions of the queries.
        keys: Those of the keys.
        device: Where it is used.
    """
    rows, columns = (torch.cat([torch.arange(*span, device=device) for span in spans]) for spans in (queries, keys))

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(sample, head, rows[query], columns[key])

    return compiled()[0](sees, *shape, len(rows), len(columns), device)


@dataclass(frozen=True)
class FlexKernel:
    """Attention of all queries and all visiting keys under a rule.

    Args:
        scaling: Multiplies the products.
    """

    scaling: float
    is_cut = False
    """Whether blocks must be small."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms, differentiable; zeros and -inf for queries that see nothing.

        Args:
            query: Shape ``(batch, heads, queries, size)``.
            key: Shape ``(batch, key/value heads, keys, size)``.
            value: Likewise; its size may be another.
            mask: As `make_block_mask` returns it.
        """
        from torch.nn.attention.flex_attention import AuxRequest

        outputs, about = compiled()[1](
            query, key, value, block_mask=mask, scale=self.scaling, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return outputs, about.lse

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, block: Block) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms; see `FusedKernel.forward`."""
        del block
        return self.attend(query.detach(), key.detach(), value.detach(), mask)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        outputs: Tensor,
        logarithms: Tensor,
        mask: Any,
        block: Block,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values; see `FusedKernel.backward`.

        The kernel's backward takes only what its own forward has returned. So this block is attended again, and is
        given the gradients that its outputs and logarithms have as parts of what was merged.
        """
        del block
        with torch.enable_grad():
            query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
            found, own = self.attend(query, key, value, mask)
        share = (own.detach() - logarithms).exp()
        shared = (gradient.to(share.dtype) * (found.detach() - outputs)).sum(-1)
        of_found = (share.unsqueeze(-1) * gradient).to(found.dtype)
        of_query, of_key, of_value = torch.autograd.grad((found, own), (query, key, value), (of_found, share * shared))
        return of_query, of_key, of_value, None
