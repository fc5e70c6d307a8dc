"""What stands outside of the layers runs only on the stages that need it: work is counted, gradients are compared."""

from functools import partial

import pytest
import torch
from cases import Case, assert_equals_one_process, in_fp64, noise, own_loss
from hybrid_runs import stages
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from booster_testing.compare import tolerance_for


class Tower(nn.Module):
    """Most of the model's work, before the layers."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return torch.tanh(self.second(torch.relu(self.first(x))))


class Towered(nn.Module):
    """Layers after a tower; a table of positions is needed by each of them."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        table = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        x = self.tower(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * table
        return self.head(x)


class Returned(Towered):
    """The head needs what the tower has returned."""

    def forward(self, x):
        start = self.tower(x)
        x = start
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + start


class Remembering(Towered):
    """The tower leaves a value in itself that the head reads, so that it runs everywhere, without its products."""

    class Tower(Tower):
        def forward(self, x):
            self.mean = x.mean(-1, keepdim=True)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.tower = self.Tower(8)

    def forward(self, x):
        return super().forward(x) * self.tower.mean


rows = noise(4, 8, dtype=torch.float64)


def operations(booster, model, _optimizer):
    """Return the floating point operations of this rank's forward."""
    with FlopCounterMode(display=False) as here:
        booster.execute_pipeline(iter([rows(0, 0)]), model, own_loss)
    return here.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        (Towered, {}, 0.0),
        (Towered, {"pp_style": "zbv"}, 0.0),
        (Returned, {}, 0.0),
        # Torch counts the tower's product of tensors without values, which is not computed.
        (Remembering, {}, 0.76),
    ],
)
def test_work_outside_of_the_layers_is_done_once(kind, options, more):
    make = partial(in_fp64, kind)
    case = Case(build=make, batch=rows, steps=2, tolerance=tolerance_for(torch.float64), outputs=True)
    found = assert_equals_one_process(case, stages(rows(0, 0)[:2], **options), tell=operations)
    with FlopCounterMode(display=False) as alone:
        make()(rows(0, 0))
    assert sum(found) / alone.get_total_flops() == pytest.approx(1.0 + more, abs=0.05)
