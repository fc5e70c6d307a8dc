"""Parameters that only some ranks use, under accumulation in bf16: gradients of one unit in several dtypes."""

import contextlib

import torch
import torch.distributed as dist
from matrix import matrix
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

BF16 = torch.bfloat16


class Forked(nn.Module):
    """A trunk and branches, of which a caller chooses."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.never = nn.Linear(8, 4)

    def forward(self, x, branches):
        hidden = self.trunk(x).tanh()
        return sum(layer(hidden) for key, layer in (("l", self.left), ("r", self.right)) if key in branches)


def make():
    torch.manual_seed(3)
    return Forked()


# For each backward, the branches of each of two ranks, and whether it reduces.
LOOPS = {
    "one after another": [(("l", "r"), False), (("r", "l"), True)],
    "reduced at the step": [(("l", "lr"), False)],
    "twice reduced at the step": [(("l", "l"), False), (("r", "l"), False)],
    "reduced first": [(("l", "l"), True), (("l", "r"), False)],
    "never accumulated": [(("l", "r"), True)],
}
FORMATS = {
    "autocast": {"precision": "bf16"},
    "fp32 sums": {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
    "torch's default": {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16)},
    "bf16 sums": {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
}


def data(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))


def gradients_of(loop, formats):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**FORMATS[formats]))
    net = make()
    names = [name for name, _ in net.named_parameters()]
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    found = []
    for repeat in range(2):
        for step, (branches, reduces) in enumerate(LOOPS[loop]):
            rank = dist.get_rank()
            with contextlib.nullcontext() if reduces else booster.no_sync(model, optimizer):
                loss = model(data(2 * repeat + step, rank), branches[rank]).float().square().mean()
                booster.backward(loss, optimizer)
        gradients = {name: full_gradient(booster, model, name) for name in names}
        found.append({name: gradient for name, gradient in gradients.items() if gradient is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


@matrix(1, loop=LOOPS, formats=FORMATS)
def test_gradients_equal_one_process(loop, formats):
    by_rank = run_on_ranks(gradients_of, 2, loop, formats)
    for repeat in range(2):
        net = make()
        for step, (branches, _) in enumerate(LOOPS[loop]):
            for rank in range(2):
                (net(data(2 * repeat + step, rank), branches[rank]).square().mean() / 2).backward()
        expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        for found in by_rank:
            assert all(gradient.dtype == torch.float32 for gradient in found[repeat].values())
            assert_same_tensors(found[repeat], expected, tolerance_for(BF16))
