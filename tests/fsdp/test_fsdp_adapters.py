"""Adapters under FSDP in bf16: the frozen base is sharded, and gathered without being rounded."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")

CONFIG = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8, "init_lora_weights": False}


def held_bytes(model):
    """Return the memory of this rank's parameters, without those gathered."""
    local = [each._local_tensor if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.numel() * each.element_size() for each in local)


def train(base_dtype, **options):
    """Return the share of a model's bytes that this rank holds, logits and gradients with those of one process, ...

    ... and what `Booster.describe` says.
    """
    booster = Booster("cpu", "bf16", TorchFSDPPlugin(**options))
    torch.manual_seed(3)
    model = booster.enable_lora(tiny_llama().to(base_dtype), lora_config=peft.LoraConfig(**CONFIG))
    alone, whole = copy.deepcopy(model), held_bytes(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    share = held_bytes(model.unwrap()) / whole
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    own = tokens[dist.get_rank() :: 2]
    with torch.no_grad():
        found = {"logits": model(input_ids=tokens).logits}
    booster.backward(model(input_ids=own, labels=own).loss, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        output = alone(input_ids=tokens, labels=tokens)
        output.loss.backward()
    expected = {"logits": output.logits.detach().float()}
    expected_gradients = {name: each.grad for name, each in alone.named_parameters() if each.requires_grad}
    gradients = {name: full_gradient(booster, model, name) for name in expected_gradients}
    optimizer.step()
    assert held_bytes(model.unwrap()) / whole == share, "nothing stays gathered"
    return share, (found, expected), (gradients, expected_gradients), booster.describe()


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_frozen_base_is_sharded_and_not_rounded(base_dtype):
    share, logits, gradients, described = train(base_dtype)
    assert share == pytest.approx(1 / 2, rel=0.01), "all dimensions are multiples of the ranks"
    assert_same_tensors(*logits, EXACT)
    assert_same_tensors(*gradients, tolerance_for(torch.bfloat16))
    assert "gathered in bfloat16, those in a unit with a frozen base as they are" in described


@on_ranks(2)
def test_without_autocast_the_base_is_gathered_in_the_narrow_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    share, logits, gradients, described = train(torch.float32, mixed_precision=policy)
    assert share == pytest.approx(1 / 2, rel=0.01)
    with pytest.raises(AssertionError, match="logits by"):
        assert_same_tensors(*logits, EXACT)
    assert_same_tensors(*logits, tolerance_for(torch.bfloat16))
    assert_same_tensors(*gradients, tolerance_for(torch.bfloat16))
    assert "frozen base" not in described
