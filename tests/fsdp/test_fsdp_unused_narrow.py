"""Parameters that only some ranks use, under accumulation in bf16: gradients of one unit in several dtypes."""

import contextlib
from functools import partial

import torch
from cases import Case, Setting, noise
from driven_runs import same_loop
from matrix import matrix
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster_fsdp import TorchFSDPPlugin
from booster_testing.compare import tolerance_for

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


def unstepped(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


@matrix(1, loop=LOOPS, formats=FORMATS)
@same_loop(
    Case(build=Forked, batch=noise(4, 6), optimizer=unstepped, tolerance=tolerance_for(BF16)),
    lambda formats: Setting(TorchFSDPPlugin, FORMATS[formats]),
)
def test_gradients_equal_one_process(run, loop):
    def loss_of(branches, x, rank):
        return run.model(x, branches[rank]).float().square().mean()

    for step in range(2):
        for number, (branches, reduces) in enumerate(LOOPS[loop]):
            with contextlib.nullcontext() if reduces else run.no_sync():
                run.backward(run.mean(2 * step + number, partial(loss_of, branches)))
        assert all(gradient.dtype == torch.float32 for gradient in run.gradients().values())
        run.step()
