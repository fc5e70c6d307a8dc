"""Masks in every form that torch's attention takes, with split sequences: plain layers train as on one process."""

from __future__ import annotations

from functools import partial

import torch
from cases import Case, Setting, assert_equals_one_process
from matrix import matrix
from torch import nn

from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing.compare import tolerance_for

SAMPLES, WIDTH, HEADS, LENGTH = 3, 16, 4, 10
MODES = ("ring_attn", "all_to_all")


def causal(batch, length):
    return torch.ones(length, length).tril().bool().expand(batch, 1, -1, -1)


def of_heads(length):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None, None].double()
    return -slopes * (torch.arange(length)[:, None] - torch.arange(length)).abs()


def padding(batch, length):
    mask = torch.ones(batch, 1, 1, length).bool()
    mask[0, ..., -3:] = False
    return mask


FORMS = {
    "(T, T)": lambda batch, length: causal(batch, length)[0, 0],
    "(T, T) added": lambda batch, length: of_heads(length)[0],
    "(H, T, T)": lambda batch, length: of_heads(length),
    "(1, T, T)": lambda batch, length: causal(batch, length)[0],
    "(1, 1, T, T)": lambda batch, length: causal(batch, length)[:1],
    "(B, 1, 1, T)": padding,
    "(B, 1, T, T)": lambda batch, length: causal(batch, length) & padding(batch, length),
    "(B, H, T, T)": lambda batch, length: of_heads(length).expand(batch, -1, -1, -1),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.blocks = form, nn.ModuleList(Block() for _ in range(2)).double()

    def forward(self, x):
        mask = FORMS[self.form](*x.shape[:2])
        for block in self.blocks:
            x = block(x, mask)
        return x


def states(length, number, replica):
    generator = torch.Generator().manual_seed(10 * number + replica)
    return torch.randn(SAMPLES, length, WIDTH, generator=generator, dtype=torch.float64)


# sequences may be as long as hidden states are wide
@matrix(1, form=list(FORMS), length=[LENGTH, WIDTH], mode=MODES)
def test_masks_mean_what_they_mean_on_one_process(form, length, mode):
    batch = partial(states, length)
    case = Case(build=partial(Model, form), batch=batch, steps=1, outputs=True, tolerance=tolerance_for(torch.float64))
    sizes = {"sp_size": 2, "sequence_parallelism_mode": mode, "custom_policy": ShardingPolicy(layers=("blocks",))}
    assert_equals_one_process(case, Setting(HybridParallelPlugin, {**sizes, "example_batch": batch(0, 0)}))
