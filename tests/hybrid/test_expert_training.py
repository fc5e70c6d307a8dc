"""Spread experts with the rest of the product: lazy models, uneven batches, adapters of other layers, overflows."""

import pytest
import torch
import torch.distributed as dist
from adapted_models import perturbed
from cases import Setting, assert_equals_one_process, sgd, train_plainly
from expert_models import LENGTH, batch_of, expert_case, make, make_optimizer
from ranked import on_ranks
from uneven_runs import assert_steps_follow_batches

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.state import NamedTensors
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext, full_gradient
from booster_testing.compare import assert_same_tensors, tolerance_for

SETTING = Setting(HybridParallelPlugin, {"ep_size": 2})


@on_ranks(2)
def test_lazy_models_make_the_experts_that_are_here():
    """A lazy model makes this rank's experts alone, and they are those of the model that is built at once."""

    def build():
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM(make("qwen3_moe").config).train()

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


@on_ranks(2)
def test_ranks_may_have_other_numbers_of_tokens():
    """In training and in evaluation."""

    def shorter_batch_of(number, replica):
        return {key: value[:, : LENGTH - 5 * replica] for key, value in batch_of(number, replica).items()}

    assert_equals_one_process(expert_case("qwen3_moe", batch=shorter_batch_of, outputs=True), SETTING)


@pytest.mark.filterwarnings(
    # Version 0.21 of peft reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
@on_ranks(2)
def test_adapters_of_other_layers_are_trained_through_frozen_experts():
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")

    def adapted():
        """Return a model with adapters around its attention, next to experts that are frozen."""
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
        return perturbed(peft.get_peft_model(make("qwen3_moe"), config)).double()

    assert_equals_one_process(expert_case("qwen3_moe", build=adapted, optimizer=sgd), SETTING)


@pytest.mark.parametrize(
    ("options", "bad_rank", "where"),
    [
        *(({"ep_size": 2, "zero_stage": stage}, rank, "loss") for stage in (0, 1, 2) for rank in (0, 1)),
        ({"ep_size": 2}, 1, "experts"),
    ],
)
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(options, bad_rank, where):
    """Let a loss be infinite, or the gradients of one rank's experts: none of the others' tokens or parameters is."""
    precision = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=2.0**10))
    booster = Booster("cpu", precision, HybridParallelPlugin(**options))
    model = make("qwen3_moe", dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))

    def values():
        return {name: tensor.detach().clone() for name, tensor in NamedTensors.of(model.unwrap()).tensors.items()}

    before = values()
    rank = dist.get_rank()
    if rank == bad_rank and where == "experts":
        experts = next(each for key, each in model.unwrap().named_parameters() if "experts.down_proj" in key)
        handle = experts.register_hook(lambda gradient: gradient * float("inf"))
    loss = model(**batch_of(0, rank)).loss
    booster.backward(loss * float("inf") if rank == bad_rank and where == "loss" else loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == 2.0**9
    for key, tensor in values().items():
        assert torch.equal(tensor, before[key]), key
    if rank == bad_rank and where == "experts":
        handle.remove()
    booster.backward(model(**batch_of(1, rank)).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == 2.0**9
    after = values()
    assert any(not torch.equal(after[key], before[key]) for key in before if "experts" in key)
