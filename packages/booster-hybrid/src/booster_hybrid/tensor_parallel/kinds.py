"""Which modules compute a plain linear map, and how they store its weight."""

from __future__ import annotations

from torch import nn


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer keeps its weight as (inputs, outputs), as transformers' ``Conv1D`` does."""
    return not isinstance(module, nn.Linear)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes a plain linear map, in either storage order."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return isinstance(module, nn.Linear)
    # Both compute the plain map, in code of their own.
    return kind.__name__ in ("Conv1D", "FalconLinear") and kind.__module__.startswith("transformers.")
