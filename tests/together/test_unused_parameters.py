"""A parameter that takes no part in backward does not keep the gradients of others from being reduced as they come.

What gradients these are, `test_programs.py` compares.
"""

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_zero import LowLevelZeroPlugin, ZeroConfig

WIDTH, DEPTH, STEPS = 32, 12, 4
LAYER = WIDTH * WIDTH
PLUGINS = {
    "zero": lambda: LowLevelZeroPlugin(bucket_bytes=4 * LAYER),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=4 * LAYER),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero=ZeroConfig(stage=2, bucket_bytes=4 * LAYER)),
}
UNUSED = {
    "nowhere": lambda layer, step, rank: layer == 5,
    "on one rank": lambda layer, step, rank: layer == 5 and rank == 1,
    "from a step on": lambda layer, step, rank: layer == 5 and step > 0,
    "now and then": lambda layer, step, rank: layer == 5 and (step + rank) % 2 == 1,
}

APART = ("on one rank", "now and then")


@matrix(
    ["hybrid-now and then"],
    # Gemini's ranks gather a parameter together, so that all must use the same.
    **{"name, case": [(name, case) for name in PLUGINS for case in UNUSED if name != "gemini" or case not in APART]},
)
@on_ranks(2)
def test_gradients_are_reduced_as_backward_goes(name, case):
    """Count how many elements of whole gradients are held at most in backward of each step."""

    class Skipping(nn.Sequential):
        def forward(self, x, skipped):
            for index, layer in enumerate(self):
                if index not in skipped:
                    x = torch.tanh(layer(x))
            return x

    rank = dist.get_rank()
    booster = Booster("cpu", plugin=PLUGINS[name]())
    torch.manual_seed(5)
    net = Skipping(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    most, held, count = [], 0, 0

    def produced(parameter):
        nonlocal held, count
        held, count = held + parameter.numel(), count + 1
        most[-1] = max(most[-1], held)

    bucket_class = type(optimizer.layout.buckets[0])
    start = bucket_class.start_reduction

    def starting(self, gradients, scratch):
        nonlocal held
        held -= sum(gradient.numel() for gradient in gradients.values())
        return start(self, gradients, scratch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_class, "start_reduction", starting)
        for step in range(STEPS):
            if step == 1:  # from where the order of gradients is known
                for parameter in net.parameters():
                    parameter.register_post_accumulate_grad_hook(produced)
            held = 0
            most.append(0)
            skipped = {layer for layer in range(DEPTH) if UNUSED[case](layer, step, rank)}
            booster.backward(model(torch.randn(4, WIDTH), skipped).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert count >= (STEPS - 1) * (DEPTH - 3)
    assert max(most[2:]) <= LAYER, "what shares a bucket with unused ones is kept, and no more"
