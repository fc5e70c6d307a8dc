"""Masks in every form that torch's attention takes, with split sequences: plain layers train as on one process."""

from __future__ import annotations

import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime import full_gradient
from booster_testing import run_on_ranks

WIDTH, HEADS, LENGTH = 16, 4, 10
MODES = ("ring_attn", "all_to_all")


def causal(batch, length):
    return torch.ones(length, length).tril().bool().expand(batch, 1, -1, -1)


def of_heads(length):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None, None]
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
        self.form, self.blocks = form, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        mask = FORMS[self.form](*x.shape[:2])
        for block in self.blocks:
            x = block(x, mask)
        return x


def compare(form, mode, length, samples):
    torch.manual_seed(0)
    whole = Model(form)
    torch.manual_seed(0)
    model = Model(form)
    policy = ShardingPolicy(layers=("blocks",))
    plugin = HybridParallelPlugin(sp_size=2, sequence_parallelism_mode=mode, custom_policy=policy)
    booster = Booster("cpu", plugin=plugin)
    loader = torch.utils.data.DataLoader(torch.randn(6, length, WIDTH), batch_size=samples)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), dataloader=loader)
    x = torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(1))
    truth, found = whole(x), model(x)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    truth.square().mean().backward()
    booster.backward(found.square().mean(), optimizer)
    for name, parameter in whole.named_parameters():
        found = full_gradient(booster, model, name)
        torch.testing.assert_close(
            found, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@matrix(1, form=list(FORMS), mode=MODES)
def test_masks_mean_what_they_mean_on_one_process(form, mode):
    run_on_ranks(compare, 2, form, mode, LENGTH, 3)


@matrix(1, form=["(T, T)", "(B, 1, 1, T)"], mode=MODES)
def test_sequences_may_be_as_long_as_hidden_states_are_wide(form, mode):
    run_on_ranks(compare, 2, form, mode, WIDTH, 3)
