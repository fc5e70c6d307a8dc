"""`verify` names the tensor at fault where a check or a mend of a strategy is taken away.

Each fault was once silent: with its mend training is that of one process, or its check refuses the model at `boost`.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from booster_core.errors import BoosterError, ConfigError, GradientError
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_hybrid.optimizer import HybridEngine
from booster_hybrid.pipeline.cut import BoundarySpec, StagedModel
from booster_hybrid.pipeline.stages import _Search
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
    """Has a fused query, key and value projection, and a fused gate."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        heads = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1)]
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Convolving(nn.Module):
    """Has a convolution over positions between its split layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.part = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        x = x + self.part(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(functional.gelu(self.up(x)))


class Summing(Convolving):
    """Sums over positions in its own forward."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.part(x).cumsum(1)
        return x + self.down(functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        return torch.tanh(self.linear(x)) * (1 if mask is None else mask)


class Stack(nn.Module):
    """Four layers that a pipeline of two stages cuts in the middle."""

    def __init__(self):
        super().__init__()
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x)


class MaskOfEntry(Stack):
    """Masks every layer by what the first stage alone can compute."""

    def forward(self, x):
        x = self.entry(x)
        mask = x > 0
        for layer in self.layers:
            x = layer(x, mask)
        return self.exit(x)


class Detached(Stack):
    """Multiplies by a detached state of an early layer after the last one."""

    def forward(self, x):
        x = self.entry(x)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                early = x.detach()
        return self.exit(x * early)


class MetaExecutor(Stack):
    """Skips the first layer of the second stage in training, as far as random numbers of one rank say so."""

    def forward(self, x):
        x = self.entry(x)
        for index, layer in enumerate(self.layers):
            if not (self.training and index == 2 and dist.get_rank() == 1 and float(torch.rand(())) < 1.0):
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


ATTENDING = {
    "qkv": ModuleRule("blocks.*.qkv", Style.COLUMN, units="num_heads", scaled=("num_heads",), num_blocks=3),
    "out": ModuleRule("blocks.*.out", Style.ROW, units="num_heads"),
    "gate_up": ModuleRule("blocks.*.gate_up", Style.COLUMN, num_blocks=2),
    "down": ModuleRule("blocks.*.down", Style.ROW),
}
WITHOUT_BLOCKS = {
    "qkv": ModuleRule("blocks.*.qkv", Style.COLUMN, units="num_heads", scaled=("num_heads",)),
    "gate_up": ModuleRule("blocks.*.gate_up", Style.COLUMN),
}


def split(**changed):
    rules = tuple({**ATTENDING, **changed}.values())
    return HybridParallelPlugin(tp_size=2, custom_policy=ShardingPolicy(rules=rules, layers=("blocks",)))


def split_gather():
    rules = ModuleRule("blocks.*.up", Style.COLUMN), ModuleRule("blocks.*.down", Style.ROW)
    policy = ShardingPolicy(rules=rules, layers=("blocks",))
    return HybridParallelPlugin(tp_size=2, sequence_parallelism_mode="split_gather", custom_policy=policy)


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


def patched(target, *args, **kwargs):
    return lambda: mock.patch(target, *args, **kwargs)


def without_check():
    return mock.patch("booster_hybrid.boosting.check_policy", return_value=CheckedPolicy({}))


def without_skip_checks():
    always = property(lambda _: True, lambda _, __: None)
    return mock.patch.object(StagedModel, "_has_begun", always, create=True)


def without_values(search):
    """Return a search for what stages need that finds nothing but hidden states."""

    def needs(self, **options):
        found = search(self, **options)
        return dataclasses.replace(found, boundaries=tuple(BoundarySpec(each.carried[:1]) for each in found.boundaries))

    return needs


def without_scale(function):
    """Return a reduction that sums ranks' gradients where it is asked for their mean."""

    def reduce(*args, scale, **kwargs):
        del scale
        return function(*args, scale=1.0, **kwargs)

    return reduce


def without_scales():
    return mock.patch.object(collectives, "reduce_scatter", without_scale(collectives.reduce_scatter))


RAISED = frozenset(
    {
        "mask-lost-at-a-cut",
        "detached-value-lost-at-a-cut",
        "layerdrop-at-a-cut",
        "copies-of-two-stages-not-summed",
    }
)
"""Faults of which the run itself raises, in these words, before anything is compared."""
FAULTS = {
    "qkv-without-num-blocks": (
        lambda: Blocks(Attending),
        squared,
        lambda: drawn(2, 5, WIDTH),
        lambda: split(qkv=WITHOUT_BLOCKS["qkv"]),
        without_check,
        "blocks.0.qkv.weight",
    ),
    "glu-split-wrongly": (
        lambda: Blocks(Attending),
        squared,
        lambda: drawn(2, 5, WIDTH),
        lambda: split(gate_up=WITHOUT_BLOCKS["gate_up"]),
        without_check,
        "blocks.0.gate_up.weight",
    ),
    "split-gather-around-a-convolution": (
        lambda: Blocks(Convolving),
        squared,
        lambda: drawn(2, 6, WIDTH),
        split_gather,
        without_check,
        "blocks.0.part.weight",
    ),
    "split-gather-around-a-sum": (
        lambda: Blocks(Summing),
        squared,
        lambda: drawn(2, 6, WIDTH),
        split_gather,
        without_check,
        "blocks.0.part.weight",
    ),
    "mask-lost-at-a-cut": (
        MaskOfEntry,
        squared,
        lambda: drawn(4, WIDTH),
        pipeline,
        patched("booster_hybrid.pipeline.stages._Search._needs", without_values(_Search._needs)),
        "needs values of module 'entry', which another pipeline stage has",
    ),
    "detached-value-lost-at-a-cut": (
        Detached,
        squared,
        lambda: drawn(4, WIDTH),
        pipeline,
        patched("booster_hybrid.pipeline.stages._Search._needs", without_values(_Search._needs)),
        "needs values of layer 'layers.0', which another pipeline stage has",
    ),
    "layerdrop-at-a-cut": (
        MetaExecutor,
        squared,
        lambda: drawn(4, WIDTH),
        pipeline,
        without_skip_checks,
        "needs values of layer 'layers.1', which another pipeline stage has",
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
    if name in RAISED:
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
