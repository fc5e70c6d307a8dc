"""Layers that attend by ``torch.nn.functional.scaled_dot_product_attention``, as plain PyTorch models do.

While such a layer runs, the function attends from this rank's positions to those of all ranks. What else the layer does
with positions is checked by `SdpaProbe`.
"""

from __future__ import annotations

import sys
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

    Collective: none; the group, in the first call of each layer.
    """
    for layer in layers:
        if "forward" in vars(layer):
            msg = (
                f"The forward of a {type(layer).__name__} is replaced already, as activation checkpointing does. With "
                f"`sequence_parallelism_mode={stack.mode!r}`, enable it after `boost`."
            )
            raise ConfigError(msg)
        vars(layer)["forward"] = _Forward(layer, stack)


class _Forward:
    """The forward of a layer in which torch's attention function attends across ranks."""

    def __init__(self, layer: nn.Module, stack: Stack) -> None:
        self._layer, self._stack = layer, stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(*args, **kwargs)
        except RuntimeError as error:
            if not self._stack.is_probing:
                raise
            msg = (
                f"A {type(self._layer).__name__} of {self._stack.model_name} can't be given a part of a sequence: "
                f"{error}. Split sequences need layers that attend by "
                "`torch.nn.functional.scaled_dot_product_attention` or transformers' attention interface alone. "
                f"Leave `sequence_parallelism_mode` out, or change the layer.{_advice(self._layer)}"
            )
            raise ConfigError(msg) from error

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self._layer).forward
        if self._stack.is_alone:
            return own(self._layer, *args, **kwargs)
        with _AcrossRanks(self._layer, self._stack):
            return own(self._layer, *args, **kwargs)


def _advice(layer: nn.Module) -> str:
    """Return what else may help with a layer of transformers, for a message."""
    if not type(layer).__module__.startswith("transformers."):
        return ""
    version = sys.modules["transformers"].__version__
    return f" This is transformers {version}; in later releases more layers attend so, those of T5 from 5.15 on."


class _AcrossRanks(TorchFunctionMode):
    def __init__(self, layer: nn.Module, stack: Stack) -> None:
        super().__init__()
        self._layer, self._stack = layer, stack

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attend across ranks, or call any other function as it is."""
        del types
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(self._layer, self._stack, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    layer: nn.Module,
    stack: Stack,
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
    dropout = 0.0 if stack.is_probing else dropout_p
    outputs, _ = attention(layer, query, key, value, attn_mask, dropout=dropout, scaling=scale, is_causal=is_causal)
    return outputs.transpose(1, 2)
