"""Layers that attend by ``torch.nn.functional.scaled_dot_product_attention``, as plain PyTorch models do.

While such a layer runs, the function attends from this rank's positions to those of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import TorchFunctionMode

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.attention import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.stack import Stack


def enter_through_sdpa(stack: Stack, layers: Sequence[nn.Module]) -> None:
    """Let torch's attention function attend across ranks inside of layers, in place.

    Args:
        stack: What the layers share.
        layers: The layers.

    Raises:
        ConfigError: If a layer's forward is replaced already.
    """
    for layer in layers:
        if "forward" in vars(layer):
            msg = (
                f"The forward of a {type(layer).__name__} is replaced already, as activation checkpointing does. With "
                f"`sequence_parallelism_mode={stack.mode!r}`, enable it after `boost`."
            )
            raise ConfigError(msg)
        vars(layer)["forward"] = _Forward(layer)


class _Forward:
    """The forward of a layer in which torch's attention function attends across ranks."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _AcrossRanks(self._layer):
            return type(self._layer).forward(self._layer, *args, **kwargs)


class _AcrossRanks(TorchFunctionMode):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attend across ranks, or call any other function as it is."""
        del types
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(self._layer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Stand for ``torch.nn.functional.scaled_dot_product_attention``."""
    if query.dim() != 4 or (key.shape[1] != query.shape[1] and not enable_gqa):
        msg = (
            f"Split sequences need attention over tensors of shape (batch, heads, positions, size), but "
            f"`scaled_dot_product_attention` was given {tuple(query.shape)} and {tuple(key.shape)}."
        )
        raise ConfigError(msg)
    outputs, _ = attention(layer, query, key, value, attn_mask, dropout=dropout_p, scaling=scale, is_causal=is_causal)
    return outputs.transpose(1, 2)
