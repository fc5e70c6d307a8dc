"""Layers are found by the dry run, without a policy: models train over a pipeline as in one process."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, in_fp64, noise
from residual_stack import Layer
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pipeline.trace import find_layers
from booster_testing.compare import tolerance_for


def held(_booster, model, _optimizer):
    return sum(parameter.numel() for parameter in model.unwrap().parameters())


def assert_pipeline_trains(case, options):
    """Train in a pipeline as one process does, a microbatch at a time; return which share each rank holds."""
    settings = {"pp_size": 2, "num_microbatches": 2, "example_batch": case.batch(0, 0), **options}
    setting = Setting(HybridParallelPlugin, settings)
    found = assert_equals_one_process(case, setting, parts=settings["num_microbatches"], tell=held)
    return [count / sum(parameter.numel() for parameter in case.make()[0].parameters()) for count in found]


def sequential():
    return nn.Sequential(nn.Linear(6, 8), Layer(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Layer(), nn.Linear(8, 3))


class Named(nn.Module):
    """Keeps its layers in a `ModuleDict`, and calls them in another order."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(6, 8)
        self.steps = nn.ModuleDict({"last": Layer(), "first": Layer(), "second": Layer()})
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 3), "two": nn.Linear(8, 3)})

    def forward(self, x):
        x = self.entry(x)
        for name in ("first", "second", "last"):
            x = self.steps[name](x)
        return sum(head(x) for head in self.heads.values())


class Pairs(nn.Module):
    """Its layers take and return one tuple of two streams."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(5, 5)
            self.mixed = nn.Linear(4, 5)

        def forward(self, streams):
            x, y = streams
            y = torch.tanh(self.right(y) + self.mixed(x))
            return torch.tanh(self.left(x)) + y[..., :4], y

    def __init__(self):
        super().__init__()
        self.entry, self.other = nn.Linear(6, 4), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x):
        streams = self.entry(x), self.other(x)
        for block in self.blocks:
            streams = block(streams)
            streams = [streams[0] * 2, streams[1] + 1]
        return torch.cat([*streams], -1)


class TwoArguments(Pairs):
    """Its layers take two streams and return them swapped, with a mask that stays as it is."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y, *, mask):
            return torch.tanh(self.right(y)) * mask, torch.tanh(self.left(x)) + y, mask

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 4)

    def forward(self, x):
        left, right, mask = self.entry(x), self.other(x), (x > 0).any(-1, keepdim=True)
        for block in self.blocks:
            left, right, mask = block(left, right, mask=mask)
        return torch.cat([left, right], -1)


class Narrowing(nn.Module):
    """Layers of changing widths, with what joins them in between, and lists of lists."""

    class Stage(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.widen = nn.Linear(width, 2 * width)
            self.blocks = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, 2 * width))

        def forward(self, x):
            return self.blocks(torch.tanh(self.widen(x)))

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([self.Stage(6), self.Stage(12), self.Stage(24)])
        self.norms = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(24), nn.LayerNorm(48)])

    def forward(self, x):
        for stage, norm in zip(self.stages, self.norms, strict=True):
            x = norm(stage(x)).view(len(x), -1)
        return x


def rows(name, number, replica):
    return {name: noise(4, 6, dtype=torch.float64)(number, replica)}


KINDS = {"sequential": sequential, "dict": Named, "pairs": Pairs, "two_arguments": TwoArguments, "widths": Narrowing}


def case_of(kind):
    batch = partial(rows, "input" if kind == "sequential" else "x")
    return Case(build=partial(in_fp64, KINDS[kind]), batch=batch, steps=2, tolerance=tolerance_for(torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_models_train_as_one_process(kind):
    assert max(assert_pipeline_trains(case_of(kind), {})) < 1.0


@pytest.mark.parametrize("kind", ["sequential", "pairs", "widths"])
def test_plain_models_are_cut_into_more_stages(kind):
    assert_pipeline_trains(case_of(kind), {"pp_style": "zbv", "num_microbatches": 4})


def test_what_is_no_list_of_layers_is_told_with_its_reason():
    class Branches(nn.Module):
        """Has lists whose members are no layers."""

        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.again = nn.ModuleList([nn.Linear(4, 4)])
            self.unused = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            x = self.again[0](self.again[0](x))
            return sum(head(x) for head in self.heads)

    found = (
        r"Branches has no list of layers that run one after the other.* 'heads' \(what 'heads\.1' is given does not "
        r"depend on what 'heads\.0' returns\), 'again' \('again\.0' is called 2 times\), 'unused' \(no member is called"
    )
    with pytest.raises(ConfigError, match=found):
        find_layers(Branches(), {"x": torch.ones(2, 4)}, 2)


@pytest.mark.parametrize(
    ("make", "batch", "num_stages", "lists"),
    [
        (sequential, {"input": torch.ones(2, 6)}, 2, [""]),
        (Named, {"x": torch.ones(2, 6)}, 2, ["steps"]),
        (Narrowing, {"x": torch.ones(2, 6)}, 3, ["stages"]),
        (Narrowing, {"x": torch.ones(2, 6)}, 4, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks"]),
    ],
    ids=["root", "dict", "outermost", "inner"],
)
def test_the_outermost_lists_that_fill_all_stages_are_chosen(make, batch, num_stages, lists):
    assert find_layers(make(), batch, num_stages) == lists
