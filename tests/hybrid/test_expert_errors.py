"""Experts of one's own train; what can't be had of spread ones raises on every rank, and says what to do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process
from expert_models import batch_of, make
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_hybrid import ExpertRule, HybridParallelPlugin, ShardingPolicy
from booster_runtime import Muon
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_zero import ZeroConfig

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
    options = {"pattern": "experts", "parameters": ("weight", "bias"), **options}
    return ShardingPolicy(experts=(ExpertRule(**options),))


def boost(model, optimizer=torch.optim.SGD):
    plugin = HybridParallelPlugin(ep_size=2, custom_policy=policy())
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


@raises_on_ranks(
    ConfigError,
    r"Adafactor updates '.*' \(.*\) as a whole, of which `ep_size=2` leaves each rank a part.*AdamW.*`ep_size=1`",
    2,
)
def test_optimizers_of_whole_matrices_are_refused():
    boost(made(), torch.optim.Adafactor)


@raises_on_ranks(
    ConfigError,
    r"Muon updates 'model\.layers\..\.mlp\.experts\.\w+_bias' \(8, \d+\) as a whole.*stacked matrices to",
    2,
)
def test_biases_of_experts_are_no_matrix_of_each_rank():
    model = make("gpt_oss")
    optimizer = Muon([p for name, p in model.named_parameters() if p.dim() > 1 and ".experts." in name])
    Booster("cpu", plugin=HybridParallelPlugin(ep_size=2)).boost(model, optimizer)


@raises_on_ranks(
    ConfigError, r"Batches have 2 microbatches on some ranks and 3 on others, and `ep_size`.*Use `num_microbatches`", 4
)
def test_other_numbers_of_microbatches_are_refused():
    model = make("qwen3_moe")
    plugin = HybridParallelPlugin(ep_size=2, pp_size=2, microbatch_size=1)
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    index, _ = plugin.data_parallel_coordinates(booster.context.coordinator)
    booster.execute_pipeline(iter([batch_of(0, index, 2 + index)]), model, lambda out, _: out.loss, optimizer)


@raises_on_ranks(GradientError, r"Experts that are spread over ranks have no second derivative.*`ep_size=1`", 2)
def test_second_derivatives_are_refused():
    model = boost(made())
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


class Odd(Mixture):
    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
        return self.experts(x, chosen[:, 0], scores)


@raises_on_ranks(
    ConfigError, r"The experts 'experts' were called with \(5, 8\), \(5,\), \(5, 2\).*`ep_size=1` for this model", 2
)
def test_experts_that_are_called_otherwise_raise():
    torch.manual_seed(5)
    boost(Odd().double())(states(0, 0))


def with_one_more_forward():
    model, x = boost(made()), states(0, 0)
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


class Branching(nn.Module):
    """The first rank skips a layer before experts: its gradients come later than the other's, or not at all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.mixture = Mixture()
        self.after = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x, skips):
        x = self.mixture(self.blocks(x))
        return x if skips else self.after(x)


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_reductions_do_not_wait_for_ranks_that_wait_for_tokens(overlap):
    """Each parameter has a bucket of its own; the ones of the layer that a rank skips hold up all others there."""
    zero = ZeroConfig(stage=2, bucket_bytes=4, overlap_communication=overlap)
    torch.manual_seed(5)
    model = Branching()
    plugin = HybridParallelPlugin(ep_size=2, custom_policy=policy(pattern="mixture.experts"), zero=zero)
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = dist.get_rank()
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        booster.backward(model(x, skips=step > 1 and step % 2 == rank).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
