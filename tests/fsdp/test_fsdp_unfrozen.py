"""Units whose parameters were all frozen at `boost` train once these are unfrozen, in low precision too."""

from __future__ import annotations

import torch
from cases import Case, Setting, assert_equals_one_process
from torch import nn

from booster_fsdp import TorchFSDPPlugin
from booster_runtime.rounding import tolerance_for


def frozen_first():
    """Return a model whose first layer, a unit of its own, is frozen."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


def over_all(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unfreeze(step, model, _optimizer):
    if step == 2:
        model[0].requires_grad_(True)


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def test_units_in_low_precision_train_once_they_are_unfrozen():
    in_bf16 = tolerance_for(torch.bfloat16)  # one process computes in fp32
    hooks = {"optimizer": over_all, "before_step": unfreeze}
    case = Case(build=frozen_first, batch=rows, steps=4, max_norm=None, tolerance=in_bf16, **hooks)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}, precision="bf16"))
