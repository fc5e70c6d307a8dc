"""`checkpoint_ratio`: a part of each stage's layers is recomputed, which changes what is kept and no number."""

import weakref

import pytest
import torch
from hybrid_runs import boosted
from matrix import matrix
from model_zoo import get_model
from ranked import raises_on_ranks
from residual_stack import Stack
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors

MICROBATCHES = 4


class Keep(torch.autograd.Function):
    """Keeps an activation for backward, and notes how many are alive."""

    @staticmethod
    def forward(ctx, x, kept, counts):
        saved = x.new_zeros(1)
        ctx.save_for_backward(saved)
        kept.append(weakref.ref(saved))
        counts.append(sum(each() is not None for each in kept))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, *kept):
        super().__init__()
        self.linear, self.dropout, self.kept = nn.Linear(4, 4), nn.Dropout(0.5), kept

    def forward(self, x):
        return self.dropout(Keep.apply(self.linear(x), *self.kept))


def train(options):
    """Return this rank's gradients, and how many activations were alive at one time."""
    kept, counts = [], []
    torch.manual_seed(3)
    model = Stack()
    model.layers = nn.ModuleList(Layer(kept, counts) for _ in range(8))
    batch = {"x": torch.ones(MICROBATCHES, 2, 4)}
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": batch}
    booster, model, optimizer = boosted(model, pp_size=2, num_microbatches=MICROBATCHES, **example, **options)
    kept.clear()
    counts.clear()
    torch.manual_seed(7)
    booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer)
    return {key: full_gradient(booster, model, key) for key in booster.plugin.parameter_paths(model)}, max(counts)


@matrix(["zbv"], style=["1f1b", "interleaved", "zbv"])
def test_gradients_are_the_same_bits_with_dropout(style):
    plain, recomputed = (
        [gradients for gradients, _ in run_on_ranks(train, 2, {"pp_style": style, **options})]
        for options in ({}, {"checkpoint_ratio": 0.5})
    )
    for expected, found in zip(plain, recomputed, strict=True):
        assert_same_tensors(found, expected, EXACT)


@pytest.mark.parametrize(
    ("ratio", "style", "expected"),
    [
        # Of two microbatches that live on the first rank, and one on the second, with four layers each.
        (None, "1f1b", [8, 4]),
        (0.5, "1f1b", [4, 2]),
        # Of what is recomputed, one layer's is there at a time.
        pytest.param(1.0, "1f1b", [1, 1], marks=pytest.mark.slow),
        # Rounded up: two layers of the first stage, one of the second.
        pytest.param((0.3, 0.1), "1f1b", [4, 3], marks=pytest.mark.slow),
        # All microbatches; as much as the first rank of 1F1B on both, of which weights need nothing later.
        (None, "gpipe", [16, 16]),
        (None, "zbv", [8, 8]),
    ],
)
def test_kept_activations_match_schedule_and_checkpoint_ratio(ratio, style, expected):
    options = {"checkpoint_ratio": ratio, "pp_style": style}
    assert [peak for _, peak in run_on_ranks(train, 2, options)] == expected


@raises_on_ranks(ConfigError, r"'model\.layers\.0' is checkpointed by the model itself", 2)
def test_checkpoint_ratio_is_refused_with_gradient_checkpointing():
    model = get_model("transformers/llama").seeded()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    boosted(model, pp_size=2, checkpoint_ratio=(1.0, 0.0))
