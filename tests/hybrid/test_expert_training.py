"""Spread experts with the rest of the product: bytes that are sent, lazy models, uneven batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Setting, assert_equals_one_process, sgd, train_plainly
from expert_models import LENGTH, batch_of, expert_case, make
from ranked import on_ranks
from torch import nn
from uneven_runs import assert_steps_follow_batches

from booster_core import Booster
from booster_hybrid import ExpertRule, HybridParallelPlugin, ShardingPolicy
from booster_hybrid.mesh import RankGroup
from booster_runtime import LazyInitContext, full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

SETTING = Setting(HybridParallelPlugin, {"ep_size": 2})
WIDTH, NUM_EXPERTS, TOP_K, TOKENS = 16, 8, 2, 24


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x, chosen, weights):
        outputs = torch.einsum("th,tkoh->tko", x, self.weight[chosen])
        return (outputs * weights[..., None]).sum(1)


class Even(nn.Module):
    """Tokens choose experts in turn, so that each rank gets as many from each."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()
        self.weights = nn.Parameter(torch.rand(TOKENS, TOP_K))

    def forward(self, x):
        chosen = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % NUM_EXPERTS
        return self.experts(x, chosen, self.weights)


def count_sent(monkeypatched):
    """Let exchanges count the bytes that this rank sends to others."""
    sent = {"floats": 0, "counts": 0}
    original = RankGroup.all_to_all

    def all_to_all(group, source, bounds, out, received):
        elsewhere = bounds[-1] - (bounds[group.rank + 1] - bounds[group.rank])
        key = "floats" if source.is_floating_point() else "counts"
        sent[key] += elsewhere * source.element_size()
        return original(group, source, bounds, out, received)

    monkeypatched.setattr(RankGroup, "all_to_all", all_to_all)
    return sent


def send_evenly():
    torch.manual_seed(5)
    model = Even()
    policy = ShardingPolicy(experts=(ExpertRule("experts"),))
    size = dist.get_world_size()
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=size, custom_policy=policy))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with pytest.MonkeyPatch.context() as patches:
        sent = count_sent(patches)
        loss = model(x).square().mean()
        forward = dict(sent)
        booster.backward(loss, optimizer)
    return forward, sent


@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_that_are_sent_follow_the_formula(size):
    """Dispatch and combine send k T H (p - 1) / p numbers each in a pass; dispatch k T (p - 1) / p weights as well."""
    share = TOP_K * TOKENS * (size - 1) / size * 4
    for forward, both in run_on_ranks(send_evenly, size):
        assert forward["floats"] == share * (2 * WIDTH + 1)
        assert both["floats"] == 2 * forward["floats"]
        assert both["counts"] == forward["counts"] == NUM_EXPERTS * (size - 1) / size * 8


@on_ranks(2)
def test_the_options_are_described():
    options = {"ep_size": 2}
    described = Booster("cpu", plugin=HybridParallelPlugin(**options)).describe()
    assert "ep_size=2" in described


def build():
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(make("qwen3_moe").config).train()


@on_ranks(2)
def test_lazy_models_make_the_experts_that_are_here():
    """A lazy model makes this rank's experts alone, and they are those of the model that is built at once."""
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=2))
    case = expert_case("qwen3_moe", steps=1, build=build)
    with LazyInitContext(default_device=booster.device):
        model, optimizer = case.make()
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(model(**batch_of(0, dist.get_rank())).loss, optimizer)
    expected = train_plainly(case, dist.get_world_size()).gradients[0]
    found = {key: full_gradient(booster, model, key) for key in expected}
    assert_same_tensors(found, expected, tolerance_for(torch.float32))


def test_ranks_that_have_run_out_of_batches_compute_the_others_tokens():
    assert_steps_follow_batches(HybridParallelPlugin(ep_size=2), 2, case=expert_case("qwen3_moe"))


def shorter_batch_of(number, replica):
    return {key: value[:, : LENGTH - 5 * replica] for key, value in batch_of(number, replica).items()}


def compare_logits(booster, model, _optimizer):
    whole = make("qwen3_moe")
    whole.load_state_dict(whole_model(booster, model))
    own = shorter_batch_of(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(model(**own).logits, whole(**own).logits)


def test_ranks_may_have_other_numbers_of_tokens():
    """In training and in evaluation."""
    assert_equals_one_process(expert_case("qwen3_moe", batch=shorter_batch_of), SETTING, tell=compare_logits)


def adapted():
    """Return a model with adapters around its attention, next to experts that are frozen."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights="gaussian")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(make("qwen3_moe"), config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:  # begins with zeros, which hide A's gradients
                    parameter.normal_(std=0.1)
    return model.double()


@pytest.mark.filterwarnings(
    # Version 0.21 of peft reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_adapters_of_other_layers_are_trained_through_frozen_experts():
    pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    assert_equals_one_process(expert_case("qwen3_moe", build=adapted, optimizer=sgd), SETTING)


class Branching(nn.Module):
    """The first rank skips a layer before experts: its gradients come later than the other's, or not at all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS), Experts()
        self.after = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x, skips):
        for block in self.blocks:
            x = block(x).relu()
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K, -1)
        x = x + self.experts(x, chosen, weights)
        return x if skips else self.after(x)


def branch(options):
    torch.manual_seed(5)
    model = Branching()
    policy = ShardingPolicy(experts=(ExpertRule("experts"),))
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=2, custom_policy=policy, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = dist.get_rank()
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        booster.backward(model(x, skips=step > 1 and step % 2 == rank).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [True, False])
def test_reductions_do_not_wait_for_ranks_that_wait_for_tokens(overlap):
    """Each parameter has a bucket of its own; the ones of the layer that a rank skips hold up all others there."""
    from booster_zero import ZeroConfig

    run_on_ranks(branch, 2, {"zero": ZeroConfig(stage=2, bucket_bytes=4, overlap_communication=overlap)})
