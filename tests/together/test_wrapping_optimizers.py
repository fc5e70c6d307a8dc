"""An optimizer that wraps another, as libraries write them: it shows the groups and the state of the one inside."""

from collections import OrderedDict

import pytest
import torch
from cases import Case, assert_equals_one_process, noise
from plugin_runs import RUNS
from torch import nn


class Projecting(torch.optim.Optimizer):
    """Takes from each gradient its part along the parameter, as OrthoGrad (https://arxiv.org/abs/2501.04697)."""

    def __init__(self, inside):
        self.inside = inside
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @property
    def param_groups(self):
        return self.inside.param_groups

    @property
    def state(self):
        return self.inside.state

    @property
    def defaults(self):
        return self.inside.defaults

    def state_dict(self):
        return self.inside.state_dict()

    def load_state_dict(self, state):
        self.inside.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_((p * p.grad).sum() / (p * p).sum().clamp(min=1e-30) * p)
        return self.inside.step(closure)


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 4))


def projecting(model):
    return Projecting(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2))


@pytest.mark.parametrize("plugin", ["zero1", "gemini", "fsdp"])
def test_it_trains_as_in_one_process_through_a_checkpoint(plugin, tmp_path):
    case = Case(build=build, batch=noise(4, 8), optimizer=projecting)
    assert_equals_one_process(case, RUNS[plugin], checkpoint=tmp_path)
