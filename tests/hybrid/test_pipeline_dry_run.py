"""The dry run that finds a model's layers: it needs no values, and leaves none behind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from booster_hybrid.pipeline.fakes import Fakes
from booster_hybrid.pipeline.trace import trace_layers
from booster_hybrid.skipped_layers import FixedDraws
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
    trace = trace_layers(model, ["blocks"], {"x": torch.ones(2, 4)})
    assert [layer.name for layer in trace.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    assert trace.uses["norm"] == (0,)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    elements = sum(parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())
    assert elements == (8 if lazy else sum(parameter.numel() for parameter in model.parameters()))


OPERATIONS = {
    "product": lambda x: x @ x.mT,
    "several": lambda x: torch.split(x, 2, dim=-1),
    "view of a part": lambda x: x[1:, :, 2:].transpose(1, 2),
    "written view": lambda x: x[0].add_(1),
    "number": lambda x: x * torch.tensor(2.0).item(),
    "begun empty": lambda x: torch.cat([torch.tensor([]), x.flatten()]),
    "narrower": lambda x: x.to(torch.bfloat16),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_remembered_equals_what_torch_returns(operation):
    real = torch.randn(2, 4, 4).double().mT
    expected = operation(real)
    with Fakes(FixedDraws()) as fakes:
        x = fakes.like(real)
        for _ in range(2):
            found = operation(x)
            for each, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
                assert (each.shape, each.stride(), each.dtype) == (other.shape, other.stride(), other.dtype)
                assert each.storage_offset() == other.storage_offset()
                is_view = other.untyped_storage().data_ptr() == real.untyped_storage().data_ptr()
                assert is_view == (each.untyped_storage()._cdata == x.untyped_storage()._cdata)


class Layered(nn.Module):
    """Three layers, and draws a number in training."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draws and self.training:
            x = x * torch.rand(())
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("draws", "is_training"), [(False, True), (True, True), (False, False)])
def test_layers_are_certain_where_training_was_seen_to_draw_nothing(draws, is_training):
    trace = trace_layers(Layered(draws=draws).train(is_training), ["blocks"], {"x": torch.ones(2, 4)})
    assert trace.is_certain == (is_training and not draws)


def test_torch_is_asked_once_for_what_all_layers_do():
    def operations_of_torch(num_layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        with mock.patch.object(FakeTensorMode, "dispatch", autospec=True, side_effect=FakeTensorMode.dispatch) as asked:
            trace_layers(model, [""], torch.ones(2, 4))
        return asked.call_count

    assert operations_of_torch(16) == operations_of_torch(2)
