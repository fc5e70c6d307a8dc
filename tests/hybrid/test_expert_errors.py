"""What can't be spread over ranks raises at `boost`, on every rank, and says what to do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process
from expert_models import batch_of, make
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_hybrid import ExpertRule, HybridParallelPlugin, ShardingPolicy
from booster_runtime import Muon
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import tolerance_for

WIDTH, NUM_EXPERTS, TOP_K = 8, 4, 2


class Experts(nn.Module):
    """Experts of a user's own: one fused weight and a bias, counted under a name of their own."""

    def __init__(self):
        super().__init__()
        self.num_here = NUM_EXPERTS
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, chosen, weights):
        everything = torch.einsum("th,eoh->teo", x, self.weight) + self.bias
        picked = torch.gather(torch.tanh(everything), 1, chosen[..., None].expand(-1, -1, WIDTH))
        return (picked * self.scale * weights[..., None]).sum(1)


class Counting(Experts):
    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights) / self.num_here


class Mixing(Experts):
    def forward(self, x, chosen, weights):
        return super().forward(x - x.mean(0), chosen, weights)


class Dense(Experts):
    def forward(self, x):
        return x


class Separate(nn.ModuleList):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x, chosen, weights):
        stacked = torch.stack([expert(x) for expert in self], 1)
        return (torch.gather(stacked, 1, chosen[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self, kind=Experts):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS), kind()

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
        return x + self.experts(x, chosen, scores)


def made(kind=Experts):
    torch.manual_seed(5)
    return Mixture(kind).double()


def policy(**options):
    options = {"parameters": ("weight", "bias"), **options}
    return ShardingPolicy(experts=(ExpertRule("experts", **options),))


def boost(model, rule, optimizer=torch.optim.SGD, **options):
    """Return a boosted model whose policy names experts by a rule, if there is one."""
    sizes = {"ep_size": 2, **options}
    plugin = HybridParallelPlugin(**sizes, custom_policy=None if rule is None else policy(**rule))
    return Booster("cpu", plugin=plugin).boost(model, optimizer(model.parameters(), lr=0.1)).model


def states(number, replica):
    generator = torch.Generator().manual_seed(10 * number + replica)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "rule"), [(Experts, {}), (Counting, {"counts": ()})])
def test_a_policy_names_experts_of_ones_own(kind, rule):
    """A scale that all experts share stays whole, and so does a count that no rule names."""
    setting = Setting(HybridParallelPlugin, {"ep_size": 2, "custom_policy": policy(**rule)})
    case = Case(build=partial(made, kind), batch=states, tolerance=tolerance_for(torch.float64))
    assert_equals_one_process(case, setting)


REFUSED = {
    "size": (Experts, {"ep_size": 2}, {}, 3, r"`ep_size=2` does not divide the data parallel size 3.*Use one of 1, 3"),
    "experts": (Experts, {"ep_size": 3}, {}, 3, r"does not divide the 4 experts of 'experts'. Use one of 1, 2, 4"),
    "none": (Experts, {"ep_size": 2}, None, 2, r"Mixture has no modules of experts.*none are known.*ExpertRule\("),
    "pattern": (Experts, {"ep_size": 2}, {"pattern": "mlp.experts"}, 2, r"no modules of experts.*'mlp.experts'"),
    "parameters": (Experts, {"ep_size": 2}, {"parameters": ()}, 2, r"'scale' \(8,\).*ExpertRule\(parameters=...\)"),
    "separate": (
        Separate,
        {"ep_size": 2},
        {"parameters": ()},
        2,
        r"'experts' \(Separate\) can't be spread.*one module",
    ),
    "missing": (Experts, {"ep_size": 2}, {"parameters": ("gate",)}, 2, r"it has no parameter 'gate' of its own"),
    "counts": (
        Counting,
        {"ep_size": 2},
        {"counts": ("num_here",)},
        2,
        r"'experts' \(Counting\).*differ by up to.*'num_here'",
    ),
    "mixing": (Mixing, {"ep_size": 2}, {}, 2, r"'experts' \(Mixing\) can't be spread over ranks: on random inputs"),
    "forward": (Dense, {"ep_size": 2}, {}, 2, r"'experts' \(Dense\).*can't be called with hidden states, indices"),
    "stage": (Experts, {"ep_size": 2, "zero_stage": 4}, {}, 2, r"`zero_stage=4` is not one of 0"),
}


def boost_with(kind, options, rule):
    if rule is not None and "pattern" in rule:
        model = made(kind)
        plugin = HybridParallelPlugin(**options, custom_policy=ShardingPolicy(experts=(ExpertRule(rule["pattern"]),)))
        Booster("cpu", plugin=plugin).boost(model)
    boost(made(kind), rule, **options)


@matrix(["parameters", "counts", "stage"], case=list(REFUSED))
def test_what_cannot_be_spread_is_refused_at_boost(case):
    kind, options, rule, num_ranks, message = REFUSED[case]
    expect_on_ranks(ConfigError, message, boost_with, num_ranks, kind, options, rule)


def with_whole_matrices():
    boost(made(), {}, torch.optim.Adafactor)


def test_optimizers_of_whole_matrices_are_refused():
    message = (
        r"Adafactor updates '.*' \(.*\) as a whole, of which `ep_size=2` leaves each rank a part.*AdamW.*`ep_size=1`"
    )
    expect_on_ranks(ConfigError, message, with_whole_matrices, 2)


def with_biases_as_a_matrix():
    model = make("gpt_oss")
    optimizer = Muon([p for name, p in model.named_parameters() if p.dim() > 1 and ".experts." in name])
    Booster("cpu", plugin=HybridParallelPlugin(ep_size=2)).boost(model, optimizer)


def test_biases_of_experts_are_no_matrix_of_each_rank():
    message = r"Muon updates 'model\.layers\..\.mlp\.experts\.\w+_bias' \(8, \d+\) as a whole.*stacked matrices to"
    expect_on_ranks(ConfigError, message, with_biases_as_a_matrix, 2)


def with_other_microbatches():
    model = make("qwen3_moe")
    plugin = HybridParallelPlugin(ep_size=2, pp_size=2, microbatch_size=1)
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    index, _ = plugin.data_parallel_coordinates(booster.context.coordinator)
    booster.execute_pipeline(iter([batch_of(0, index, 2 + index)]), model, lambda out, _: out.loss, optimizer)


def test_other_numbers_of_microbatches_are_refused():
    message = r"Batches have 2 microbatches on some ranks and 3 on others, and `ep_size`.*Use `num_microbatches`"
    expect_on_ranks(ConfigError, message, with_other_microbatches, 4)


def twice():
    model = boost(made(), {})
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_second_derivatives_are_refused():
    expect_on_ranks(
        GradientError, r"Experts that are spread over ranks have no second derivative.*`ep_size=1`", twice, 2
    )


class Odd(Mixture):
    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
        return self.experts(x, chosen[:, 0], scores)


def called_otherwise():
    torch.manual_seed(5)
    boost(Odd().double(), {})(states(0, 0))


def test_experts_that_are_called_otherwise_raise():
    message = r"The experts 'experts' were called with \(5, 8\), \(5,\), \(5, 2\).*`ep_size=1` for this model"
    expect_on_ranks(ConfigError, message, called_otherwise, 2)


def with_one_more_forward():
    model, x = boost(made(), {}), states(0, 0)
    model(x)
    if dist.get_rank() == 0:
        try:
            model(x)
        except Exception as error:  # noqa: BLE001 - its class depends on the transport
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(120)
def test_a_rank_that_does_not_call_the_model_is_named():
    message, _ = run_on_ranks(with_one_more_forward, 2, group_timeout_seconds=4.0)
    assert message.startswith("MissingRanksError")
    assert "forward" in message
