"""Stepping an optimizer on some of its parameters at a time, where that gives what one step on all of them gives.

torch's own optimizers keep everything that they remember by parameter, so they may. Another class may count steps for
a whole group, or keep state of its own. It is probed on tiny tensors; if a step in parts differs in a single bit, it
steps on everything at once.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from booster_runtime.sharding import ELEMENTWISE, WHOLE, distinct_groups, probed_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

_STEPS = 4


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Return whether calling ``step`` once for each part of the parameters equals calling it once for all.

    Args:
        optimizer: The user's optimizer. One with hooks around ``step`` is stepped once: hooks count steps.

    Collective: none; the answer is the same on every rank.
    """
    if _has_step_hooks(optimizer):
        return False
    if type(optimizer) in ELEMENTWISE | WHOLE:
        return True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = [torch.randn(6, 5), torch.randn(6, 5)]
        gradients = [[torch.randn(6, 5), torch.randn(6, 5)] for _ in range(_STEPS)]
    try:
        for group in distinct_groups(optimizer.param_groups):
            at_once = probed_steps(optimizer, group, values, gradients)
            in_parts = probed_steps(optimizer, group, values, gradients, in_parts=True)
            if not at_once.equals(in_parts):
                return False
    except Exception:  # noqa: BLE001 - an optimizer that can't be probed steps on everything
        return False
    return True


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
