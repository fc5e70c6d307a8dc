"""The dry run that finds a model's layers: it needs no values, and leaves none behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_hybrid import PipelineConfig
from booster_hybrid.pipeline.stages import find_cuts
from booster_runtime import LazyInitContext
from booster_runtime.lazy import take_recording


class Normed(nn.Module):
    """Writes to buffers, and looks at values on its way where it is told to."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x.relu() if self.looks and bool((x > 0).all()) else x


@pytest.mark.parametrize("looks", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_layers_are_found_and_buffers_stay(lazy: bool, looks: bool) -> None:
    if lazy:
        with LazyInitContext():
            model = Normed(looks=looks)
        take_recording(model, "cpu")
    else:
        model = Normed(looks=looks)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    trace = find_cuts(model, ["blocks"], {"x": torch.ones(2, 4)}, PipelineConfig(size=2), trains=True).trace
    assert [layer.name for layer in trace.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    assert trace.uses["norm"] == (0,)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    elements = sum(parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())
    assert elements == (8 if lazy else sum(parameter.numel() for parameter in model.parameters()))
