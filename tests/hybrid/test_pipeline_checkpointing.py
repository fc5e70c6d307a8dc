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
KEPT_BYTES = 1 << 20


class Kept:
    """Counts the activations that are alive."""

    live = peak = 0

    def add(self, tensor):
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self.remove)

    def remove(self):
        self.live -= 1


class Keep(torch.autograd.Function):
    """Keeps an activation for backward."""

    @staticmethod
    def forward(ctx, x, kept):
        saved = x.new_zeros(KEPT_BYTES // x.element_size())
        kept.add(saved)
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors
        return gradient, None


class Layer(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.kept = kept

    def forward(self, x):
        return self.dropout(Keep.apply(self.linear(x), self.kept))


def train(options):
    """Return this rank's gradients, and how many large activations were alive at one time."""
    kept = Kept()
    torch.manual_seed(3)
    model = Stack()
    model.layers = nn.ModuleList(Layer(kept) for _ in range(8))
    batch = {"x": torch.ones(MICROBATCHES, 2, 4)}
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": batch}
    booster, model, optimizer = boosted(model, pp_size=2, num_microbatches=MICROBATCHES, **example, **options)
    kept.live = kept.peak = 0
    torch.manual_seed(7)
    booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer)
    return {key: full_gradient(booster, model, key) for key in booster.plugin.parameter_paths(model)}, kept.peak


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
