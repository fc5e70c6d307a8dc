"""Which modules of a model are experts, read from what the model carries or from a policy."""

from __future__ import annotations

import pytest
import torch
from expert_models import MODELS, make
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import ExpertRule, ShardingPolicy
from booster_hybrid.expert_parallel.apply import find_experts
from booster_hybrid.policy.find import expert_rules, policy_for
from booster_hybrid.probe.experts import check_experts


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


def test_models_without_experts_have_no_rules():
    assert expert_rules(nn.Linear(2, 2)) == []


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


class Own(nn.Module):
    """Experts of a user's own, with a scale that all of them share, counted under a name of their own."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.ones(8))
        self.num_here = 4

    def forward(self, x, index, weights):
        everything = torch.einsum("th,eoh->teo", x, self.weight)
        picked = torch.gather(everything, 1, index[..., None].expand(-1, -1, 8))
        return (picked * self.scale * weights[..., None]).sum(1) / self.num_here


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
        (Own, {}, 2, r"'scale' \(8,\).*ExpertRule\(parameters=...\)"),
        (Own, {"parameters": ("gate",)}, 2, r"it has no parameter 'gate' of its own"),
        (Own, {"parameters": ("weight",), "counts": ("num_here",)}, 2, r"\(Own\).*differ by up to.*'num_here'"),
        (lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), {}, 2, r"'experts' \(ModuleList\).*one module"),
        (Dense, {}, 2, r"'experts' \(Dense\).*can't be called with hidden states, indices"),
    ],
    ids=["size", "none", "pattern", "parameters", "missing", "counts", "separate", "forward"],
)
def test_what_can_not_be_spread_is_refused(experts, rule, size, message):
    rules = [] if rule is None else [ExpertRule(**{"pattern": "experts", **rule})]
    with pytest.raises(ConfigError, match=message):
        check_experts(find_experts(nn.ModuleDict({"experts": experts()}), rules, size), torch.device("cpu"))
