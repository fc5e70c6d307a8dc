"""A backward that raises, and what comes after it: gradients add up as in one process, and no rank waits forever."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases import Case, noise
from driven_runs import assert_same_loop
from matrix import matrix
from plugin_runs import runs
from torch import nn

PLUGINS = runs("zero1", "zero2", "gemini")


class FailingError(RuntimeError):
    pass


class Net(nn.Module):
    """Three layers, of which backward may reach only the last ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.fails_before = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fails_before == number:
                x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise FailingError(gradient.shape)


def adds_up(run, *, rounds, is_warm):
    """Run backward several times: for each, the layer before which it raises on every rank, or ``None``."""
    if is_warm:
        run.backward(run.loss(50))
        run.step()
    for number, run.net.fails_before in enumerate(rounds):
        for x in run.batches(number):
            loss = run.model(x).square().mean() / len(run.ranks)
            with nullcontext() if run.net.fails_before is None else pytest.raises(FailingError):
                run.backward(loss)
    run.steps.append(run.gradients())


@matrix(["gemini"], plugin=PLUGINS)
def test_gradients_after_a_backward_that_raised_equal_one_process(plugin):
    for rounds in ((0, None), (1, None, 0)):
        for is_warm in (False, True):
            loop = partial(adds_up, rounds=rounds, is_warm=is_warm)
            assert_same_loop(loop, Case(build=Net, batch=noise(4, 6)), PLUGINS[plugin])
