"""Adapters under FSDP in bf16: the frozen base is sharded, and gathered without being rounded."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")

CONFIG = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8, "init_lora_weights": False}


def make_model(booster, base_dtype):
    torch.manual_seed(3)
    return booster.enable_lora(tiny_llama().to(base_dtype), lora_config=peft.LoraConfig(**CONFIG))


def held_bytes(model):
    """Return the memory of this rank's parameters, without those gathered."""
    local = [each._local_tensor if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.numel() * each.element_size() for each in local)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def tokens_of(step):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))


def train(options, base_dtype):
    """Return the share of a model's bytes that this rank holds, logits and gradients with those of one process, ...

    ... and what `Booster.describe` says.
    """
    coordinator = DistCoordinator()
    booster = Booster("cpu", "bf16", TorchFSDPPlugin(**options))
    model = make_model(booster, base_dtype)
    alone, whole = copy.deepcopy(model), held_bytes(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    share = held_bytes(model.unwrap()) / whole
    tokens = tokens_of(0)
    with torch.no_grad():
        found = {"logits": model(input_ids=tokens).logits}
    booster.backward(loss_of(model, tokens[coordinator.rank :: coordinator.world_size]), optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = {"logits": alone(input_ids=tokens).logits.detach().float()}
        loss_of(alone, tokens).backward()
    expected_gradients = {name: each.grad for name, each in alone.named_parameters() if each.requires_grad}
    gradients = {name: full_gradient(booster, model, name) for name in expected_gradients}
    optimizer.step()
    assert held_bytes(model.unwrap()) / whole == share, "nothing stays gathered"
    return share, (found, expected), (gradients, expected_gradients), booster.describe()


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_frozen_base_is_sharded_and_not_rounded(base_dtype):
    for share, logits, gradients, described in run_on_ranks(train, 2, {}, base_dtype):
        assert share == pytest.approx(1 / 2, rel=0.01), "all dimensions are multiples of the ranks"
        assert_same_tensors(*logits, EXACT)
        assert_same_tensors(*gradients, tolerance_for(torch.bfloat16))
        assert "gathered in bfloat16, those in a unit with a frozen base as they are" in described


def test_without_autocast_the_base_is_gathered_in_the_narrow_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for share, logits, gradients, described in run_on_ranks(train, 2, {"mixed_precision": policy}, torch.float32):
        assert share == pytest.approx(1 / 2, rel=0.01)
        with pytest.raises(AssertionError, match="logits by"):
            assert_same_tensors(*logits, EXACT)
        assert_same_tensors(*logits, tolerance_for(torch.bfloat16))
        assert_same_tensors(*gradients, tolerance_for(torch.bfloat16))
        assert "frozen base" not in described
