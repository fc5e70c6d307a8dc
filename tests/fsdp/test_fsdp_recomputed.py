"""A checkpoint of the whole model: backward runs it again, and it is gathered and freed as in any backward."""

import pytest
import torch
from cases import Case, Setting, noise
from driven_runs import assert_same_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_fsdp import TorchFSDPPlugin


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def checkpointed(run, batch, use_reentrant):
    return checkpoint(run.model, batch.requires_grad_(), use_reentrant=use_reentrant)


def recomputes(run, use_reentrant):
    for step in range(3):
        run.backward(run.mean(step, lambda batch, _: checkpointed(run, batch, use_reentrant).square().mean()))
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
    assert_same_loop(loop, Case(build=net, batch=noise(4, 8), max_norm=None), setting)
