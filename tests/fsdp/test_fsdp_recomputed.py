"""A checkpoint of the whole model: backward runs it again, and it is gathered and freed as in any backward."""

import pytest
import torch
from cases import Case, Setting
from driven_runs import assert_same_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_fsdp import TorchFSDPPlugin


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica)).requires_grad_()


def recomputes(run, use_reentrant):
    for step in range(3):
        run.backward(
            run.mean(step, lambda batch, _: checkpoint(run.model, batch, use_reentrant=use_reentrant).square().mean())
        )
        with torch.no_grad():
            run.loss(step)
        run.step()


def saves_tensors(run):
    recomputes(run, use_reentrant=False)


def runs_backward_inside(run):
    recomputes(run, use_reentrant=True)


@pytest.mark.parametrize("loop", [saves_tensors, runs_backward_inside], ids=lambda loop: loop.__name__)
def test_a_checkpoint_of_the_whole_model(loop):
    setting = Setting(TorchFSDPPlugin, {"unit_classes": ("Linear",)})
    assert_same_loop(loop, Case(build=net, batch=rows, max_norm=None), setting)
