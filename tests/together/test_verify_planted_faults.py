"""`verify` names the tensor at fault where a check or a mend of a strategy is taken away: one of each."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from booster_core.errors import BoosterError, ConfigError, GradientError
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_hybrid.optimizer import HybridEngine
from booster_hybrid.probe.probe import CheckedPolicy
from booster_runtime import collectives
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import TinyStack
from booster_tools import TrainingFunctions, verify
from booster_zero import LowLevelZeroPlugin
from booster_zero.gathering import SavedUses

WIDTH = 8


def squared(outputs, batch):
    """Return a loss whose gradients differ between samples."""
    del batch
    return outputs.square().mean()


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Attending(nn.Module):
    """Has a fused query, key and value projection."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1)]
        return x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stack(nn.Module):
    """Four layers that a pipeline of two stages cuts in the middle."""

    def __init__(self):
        super().__init__()
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x)


class Complex(nn.Module):
    """Multiplies by complex numbers that are views of real parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.ones(WIDTH // 2, 2))
        self.rotation = nn.Parameter(torch.randn(WIDTH // 2, 2))

    def forward(self, x):
        x = self.first(x) * self.other.flatten()
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(self.rotation)
        return self.last(torch.view_as_real(turned).flatten(-2))


def split_without_blocks():
    """Split the projection as if it were one, and not three."""
    rules = (
        ModuleRule("blocks.*.qkv", Style.COLUMN, units="num_heads", scaled=("num_heads",)),
        ModuleRule("blocks.*.out", Style.ROW, units="num_heads"),
    )
    return HybridParallelPlugin(tp_size=2, custom_policy=ShardingPolicy(rules=rules, layers=("blocks",)))


def pipeline(example=None):
    example = drawn(2, WIDTH) if example is None else example
    return HybridParallelPlugin(pp_size=2, custom_policy=ShardingPolicy(layers=("layers",)), example_batch=example)


def tokens():
    return torch.randint(1, 16, (4, 6), generator=torch.Generator().manual_seed(1))


def of_logits(outputs, batch):
    return functional.cross_entropy(outputs.flatten(0, 1), batch.flatten())


def wrong_view(self, note):
    """Find saved values as if they were in the format of the bucket."""
    gatherer = self._gatherer
    bucket = gatherer.layout.bucket_of(note.number)
    gatherer.use(bucket)
    slot = next(slot for slot in bucket.plan.slots if slot.index == note.number)
    found = torch.empty(0, dtype=note.dtype)
    return found.set_(bucket.whole.untyped_storage(), slot.offset // 4, note.shape, note.strides)


def without_check():
    return mock.patch("booster_hybrid.boosting.check_policy", return_value=CheckedPolicy({}))


def without_scale(function):
    """Return a reduction that sums ranks' gradients where it is asked for their mean."""

    def reduce(*args, scale, **kwargs):
        del scale
        return function(*args, scale=1.0, **kwargs)

    return reduce


def without_scales():
    return mock.patch.object(collectives, "reduce_scatter", without_scale(collectives.reduce_scatter))


FAULTS = {
    "qkv-without-num-blocks": (
        Blocks,
        squared,
        lambda: drawn(2, 5, WIDTH),
        split_without_blocks,
        without_check,
        "blocks.0.qkv.weight",
    ),
    "view-in-another-dtype": (
        Complex,
        squared,
        lambda: drawn(4, WIDTH),
        lambda: GeminiPlugin(min_chunk_bytes=8192),
        lambda: mock.patch.object(SavedUses, "give", wrong_view),
        "first.weight",
    ),
    "copies-of-two-stages-not-summed": (
        TinyStack,
        of_logits,
        tokens,
        lambda: pipeline(tokens()),
        lambda: mock.patch.object(HybridEngine, "join_tied_uses", lambda _, used: used),
        "1 parameter(s) differ between ranks that hold the same: 'embedding.weight'",
    ),
    "sums-in-place-of-means": (
        Stack,
        squared,
        lambda: drawn(4, WIDTH),
        lambda: LowLevelZeroPlugin(stage=1),
        without_scales,
        "exit.weight",
    ),
}


def functions_of(make, criterion, batch):
    def build():
        model = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return TrainingFunctions(build, batch, criterion)


def found_by(name):
    """Verify with the mend or check, and without it."""
    make, criterion, batch, plugin, plant, _ = FAULTS[name]
    functions = functions_of(make, criterion, batch)
    try:
        is_mended = not verify(functions, plugin()).unexplained
    except ConfigError:
        is_mended = True
    with plant():
        try:
            report = verify(functions, plugin())
        except BoosterError as error:
            return is_mended, str(error)
    return is_mended, [(found.what, found.name) for found in report.unexplained]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_the_tensor_is_named(name):
    (is_mended, found), of_other = run_on_ranks(found_by, 2, name)
    assert is_mended
    if name == "copies-of-two-stages-not-summed":  # the run itself raises, before anything is compared
        assert FAULTS[name][-1] in found
        assert FAULTS[name][-1] in of_other[1]
    else:
        assert (is_mended, found) == of_other
        assert ("gradient", FAULTS[name][-1]) in found


def build_stack():
    model = Stack()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_class_weights():
    """Return samples with the weights of eight classes among them."""
    return {"x": drawn(8, WIDTH), "y": torch.arange(8) % 4, "weights": torch.arange(1.0, 9.0)}


def weighted(outputs, batch):
    losses = functional.cross_entropy(outputs, batch["y"], reduction="none")
    return (losses * batch["weights"][batch["y"]]).mean()


def verify_weighted():
    verify(TrainingFunctions(build_stack, with_class_weights, weighted), pipeline()).check()


def test_class_weights_that_microbatches_cut_are_found():
    expect_on_ranks(GradientError, "gradient 'exit.weight' at step 1", verify_weighted, 2)
