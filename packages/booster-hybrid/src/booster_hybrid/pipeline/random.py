"""Random numbers along a pipeline: each stage's dropout draws by itself, and what is drawn outside stays alike.

Ranks that were seeded alike would drop the same places in the first layer of each stage, the second, and so on. So a
rank draws, while it works on a batch, from a stream made of a number that its generator gives and its position. Before
and after, generators are where the ranks have them: what a script draws alike on all of them, it still does. Layers
and microbatches draw one after the other; activation checkpointing restores the stream for what it recomputes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from booster_hybrid.tensor_parallel.streams import draws, mixed_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_RANGE = 2**62


@contextlib.contextmanager
def stream_of(model: nn.Module, index: int, device: torch.device) -> Iterator[None]:
    """Let a model that trains, and drops anything, draw from its rank's own stream in this context.

    Args:
        model: The model.
        index: The rank's position in the pipeline.
        device: Where the model computes.

    Collective: none; each rank's generator advances by one number.
    """
    if not model.training or not draws(model):
        yield
        return
    seed = mixed_seed(int(torch.randint(_RANGE, ())), index)
    is_host = device.type == "cpu"
    with torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type):
        torch.default_generator.manual_seed(seed)
        if not is_host:
            torch.get_device_module(device).manual_seed(seed)
        yield
