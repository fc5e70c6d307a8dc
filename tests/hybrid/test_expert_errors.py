"""Which modules are experts, and experts of one's own; what can't be had of spread ones raises on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise
from expert_models import MODELS, batch_of, make
from hybrid_runs import boosted
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_hybrid import ExpertRule, HybridParallelPlugin, ShardingPolicy
from booster_hybrid.expert_parallel.apply import find_experts
from booster_hybrid.policy.find import expert_rules, policy_for
from booster_hybrid.probe.experts import check_experts
from booster_runtime import Muon
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
        known = chosen.clamp(max=len(self.weight) - 1)[..., None].expand(-1, -1, WIDTH)
        picked = torch.gather(torch.tanh(everything), 1, known)
        return (picked * self.scale * (weights * (chosen < len(self.weight)))[..., None]).sum(1)


class Counting(Experts):
    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights) / self.num_here


class Mixture(nn.Module):
    """Drops choices of little weight, as routers with a capacity do: their index is the number of experts."""

    def __init__(self, kind=Experts):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS), kind()

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
        return x + self.experts(x, chosen.masked_fill(scores < 0.3, NUM_EXPERTS), scores)


def made(kind=Experts):
    torch.manual_seed(5)
    return Mixture(kind).double()


def policy(**options):
    options = {"pattern": "experts", "parameters": ("weight", "bias"), **options}
    return ShardingPolicy(experts=(ExpertRule(**options),))


def boost(model, optimizer=torch.optim.SGD):
    plugin = HybridParallelPlugin(ep_size=2, custom_policy=policy())
    return Booster("cpu", plugin=plugin).boost(model, optimizer(model.parameters(), lr=0.1)).model


states = noise(5, WIDTH, dtype=torch.float64)


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
    booster, model, optimizer = boosted(make("qwen3_moe"), ep_size=2, pp_size=2, microbatch_size=1)
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    booster.execute_pipeline(iter([batch_of(0, index, 2 + index)]), model, lambda out, _: out.loss, optimizer)


@raises_on_ranks(GradientError, r"Experts that are spread over ranks have no second derivative.*`ep_size=1`", 2)
def test_second_derivatives_are_refused():
    model = boost(made())
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


@raises_on_ranks(
    ConfigError, r"The experts 'experts' were called with \(5, 8\), \(5,\), \(5, 2\).*`ep_size=1` for this model", 2
)
def test_experts_that_are_called_otherwise_raise():
    class Odd(Mixture):
        def forward(self, x):
            scores, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
            return self.experts(x, chosen[:, 0], scores)

    torch.manual_seed(5)
    boost(Odd().double())(states(0, 0))


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_reductions_do_not_wait_for_ranks_that_wait_for_tokens(overlap):
    """Each parameter has a bucket of its own; the ones of the layer that a rank skips hold up all others there."""

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

    zero = ZeroConfig(stage=2, bucket_bytes=4, overlap_communication=overlap)
    torch.manual_seed(5)
    options = {"ep_size": 2, "custom_policy": policy(pattern="mixture.experts"), "zero": zero}
    booster, model, optimizer = boosted(Branching(), **options)
    rank = dist.get_rank()
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        booster.backward(model(x, skips=step > 1 and step % 2 == rank).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


# ---- which modules are experts


@pytest.mark.parametrize("name", list(MODELS))
def test_plans_name_every_parameter_of_experts(name):
    model = make(name, dtype=torch.float32)
    if name != "llama4" and getattr(model.config, "base_model_ep_plan", None) is None:
        model._ep_plan = {}  # as transformers has made it
        with pytest.raises(ConfigError, match=r"none are known for this class: transformers 5.* has no plan"):
            find_experts(model, expert_rules(model), 2)
        return
    found = {each.name: each for each in find_experts(model, expert_rules(model), 2)}
    present = {key for key, _ in model.named_modules() if key.endswith(".experts")}
    assert present
    assert found.keys() == present
    for each in found.values():
        assert each.num_experts == 8
        assert dict(each.parameters) == dict(each.module.named_parameters())
    check_experts([*found.values()], torch.device("cpu"))


def test_a_policy_of_experts_alone_leaves_the_other_rules_to_the_plan():
    model = make("qwen3_moe", dtype=torch.float32)
    policy = ShardingPolicy(experts=(ExpertRule("layers.0.mlp.experts"),))
    assert policy_for(model, policy) == policy_for(model)
    (found,) = find_experts(model, expert_rules(model, policy), 4)
    assert found.name == "model.layers.0.mlp.experts"
    assert policy_for(model, ShardingPolicy(layers=("model.layers",))).rules == ()


def test_the_check_leaves_the_module_and_random_numbers_as_they_are():
    model = make("qwen3_moe", dtype=torch.float32)
    found = find_experts(model, expert_rules(model), 2)
    module = found[0].module
    before = {key: value.clone() for key, value in module.named_parameters()}
    state = torch.random.get_rng_state()
    check_experts(found, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert module.num_experts == 8
    assert module.training
    for key, value in module.named_parameters():
        assert torch.equal(value, before[key])


class Limited(nn.Module):
    """Experts that leave out tokens beyond a capacity, or scale by how many there are."""

    def __init__(self, kind, limit=0):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.randn(4, 8, 8))
        self.kind, self.limit = kind, limit

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            row, choice = (index == number).nonzero(as_tuple=True)
            if self.kind == "capacity":
                row, choice = row[: self.limit], choice[: self.limit]
            rows = x[row] @ self.weight[number] * weights[row, choice, None]
            mean = rows.mean() if len(row) else 0.0
            if self.kind == "mean":
                rows = rows - mean
            elif self.kind == "gradient" and len(row):
                rows = rows - mean + mean.detach()
            out = out.index_add(0, row, rows)
        return out / len(x) if self.kind == "share" else out


def spread(*experts):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"experts": each}) for each in experts)})
    check_experts(find_experts(model, [ExpertRule("layers.*.experts")], 2), torch.device("cpu"))


@pytest.mark.parametrize(
    "experts",
    [Limited("capacity", 12), Limited("mean"), Limited("gradient"), Limited("share")],
    ids=lambda each: each.kind,
)
def test_experts_that_look_at_other_tokens_are_refused(experts):
    with pytest.raises(ConfigError, match=r"experts 'layers\.0\.experts' \(Limited\) can't be spread"):
        spread(experts)


def test_a_forward_that_was_replaced_is_what_is_checked():
    experts = Limited("none")
    forward = experts.forward
    experts.forward = lambda x, index, weights: forward(x - x.mean(0), index, weights)
    replaced = experts.forward
    with pytest.raises(ConfigError, match="can't be spread over ranks: on random inputs its outputs"):
        spread(experts)
    assert experts.forward is replaced


def test_experts_that_differ_by_an_attribute_are_all_checked():
    spread(Limited("none"), Limited("none"))
    with pytest.raises(ConfigError, match=r"experts 'layers\.1\.experts'"):
        spread(Limited("capacity", 10**6), Limited("capacity", 12))


COUNTED = {"parameters": ("weight", "bias"), "counts": ("num_here",)}


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("experts", "rule", "size", "message"),
    [
        (Dense, {}, 3, r"does not divide the 4 experts of 'experts'. Use one of 1, 2, 4"),
        (Dense, None, 2, r"ModuleDict has no modules of experts.*none are known.*ExpertRule\("),
        (Dense, {"pattern": "mlp.experts"}, 2, r"no modules of experts.*'mlp.experts'"),
        (Experts, {}, 2, r"'scale' \(8,\).*ExpertRule\(parameters=...\)"),
        (Experts, {"parameters": ("gate",)}, 2, r"it has no parameter 'gate' of its own"),
        (Counting, COUNTED, 2, r"\(Counting\).*differ by up to.*'num_here'"),
        (lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), {}, 2, r"'experts' \(ModuleList\).*one module"),
        (Dense, {}, 2, r"'experts' \(Dense\).*can't be called with hidden states, indices"),
    ],
    ids=["size", "none", "pattern", "parameters", "missing", "counts", "separate", "forward"],
)
def test_what_can_not_be_spread_is_refused(experts, rule, size, message):
    rules = [] if rule is None else [ExpertRule(**{"pattern": "experts", **rule})]
    with pytest.raises(ConfigError, match=message):
        check_experts(find_experts(nn.ModuleDict({"experts": experts()}), rules, size), torch.device("cpu"))
