"""Stepping an optimizer on some of its parameters at a time, where that gives what one step on all of them gives.

torch's own optimizers keep everything that they remember by parameter, so they may. Another class may count steps for
a whole group, or keep state of its own, and steps on everything at once.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from booster_runtime.sharding import OF_TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Return whether calling ``step`` once for each part of the parameters equals calling it once for all.

    Args:
        optimizer: The user's optimizer. One with hooks around ``step`` is stepped once: hooks count steps.
    """
    return type(optimizer) in OF_TORCH and not _has_step_hooks(optimizer)


@contextlib.contextmanager
def only(optimizer: Optimizer, held: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
    """Let an optimizer's groups list some of their parameters only, while the body runs.

    Args:
        optimizer: The optimizer.
        held: For each group, the parameters that it lists meanwhile.
    """
    groups = optimizer.param_groups
    everything = [list(group["params"]) for group in groups]
    try:
        for group, some in zip(groups, held, strict=True):
            group["params"][:] = some
        yield
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"][:] = parameters


def _has_step_hooks(optimizer: Optimizer) -> bool:
    return any(bool(vars(optimizer).get(name)) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
