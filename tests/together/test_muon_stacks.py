"""Muon on matrices and on stacks of them, the weights of experts: one process's training, under every plugin.

Runs in fp64, as Muon's steps in bf16 make much of other roundings in fp32.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Setting, assert_equals_one_process
from expert_models import expert_case
from matrix import matrix, named

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import Muon
from booster_runtime.sharding import step_cost
from booster_testing.compare import Tolerance
from booster_zero import LowLevelZeroPlugin

HYBRID = {
    "zero-3": {"zero_stage": 3},
    "tp": {"tp_size": 2},
    "tp zero-2": {"tp_size": 2, "zero_stage": 2},
    "ep": {"ep_size": 2},
    "ep zero-1": {"ep_size": 2, "zero_stage": 1},
    "ep zero-3": {"ep_size": 2, "zero_stage": 3},
    "ep tp": {"ep_size": 2, "tp_size": 2},
}
FOUR = ("ep zero-1", "ep zero-3", "ep tp", "tp zero-2")
SETTINGS = {
    "ddp": Setting(TorchDDPPlugin),
    "fsdp": Setting(TorchFSDPPlugin, {"unit_classes": ["MixtralDecoderLayer"]}),
    "zero-1": Setting(LowLevelZeroPlugin, {"bucket_bytes": 2**14}),
    "zero-2": Setting(LowLevelZeroPlugin, {"stage": 2, "cpu_offload": True}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 2**14, "leaf_modules": ["MixtralExperts"]}),
    **{name: Setting(HybridParallelPlugin, options, 4 if name in FOUR else 2) for name, options in HYBRID.items()},
}


class InFullPrecision(Muon):
    """Orthogonalizes in the format of the gradients: in bf16 the last bit of a norm decides 2**-8 of an element."""

    def _orthogonalized(self, update, group):
        a, b, c = group["ns_coefficients"]
        found = update.mT if update.shape[-2] > update.shape[-1] else update
        found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=group["eps"])
        for _ in range(group["ns_steps"]):
            gram = found @ found.mT
            found = a * found + (b * gram + c * gram @ gram) @ found
        return found.mT if update.shape[-2] > update.shape[-1] else found


def with_muon(model, kind=Muon):
    chosen = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." in name and ".gate." not in name]
    assert any(parameter.dim() == 3 for parameter in chosen)
    held = {id(parameter) for parameter in chosen}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    return [kind(chosen, lr=0.02), torch.optim.AdamW(others, lr=1e-2, eps=1e-2)]


CASE = expert_case("mixtral", optimizer=with_muon, steps=3)
ROUNDED = "transformers' norms are in fp32: what tensor parallel ranks add up in another order has other last bits, and"
OF_NORMS = Tolerance(relative=1e-4, reason=f"{ROUNDED} Muon makes some hundred times as much of them")


@matrix(["fsdp", "gemini", "ep zero-1"], setting=named(SETTINGS.values(), SETTINGS))
def test_training_equals_one_process_through_a_checkpoint(setting, tmp_path):
    case = CASE
    if "tp_size" in setting.options:
        case = replace(CASE, optimizer=partial(with_muon, kind=InFullPrecision), tolerance=OF_NORMS)
    assert_equals_one_process(case, setting, checkpoint=tmp_path / "run")


def costs_here(_booster, _model, optimizers):
    """Return what Muon's step costs on this rank: pieces of other ranks' parameters have no elements."""
    muon = optimizers[0]
    stepped = muon.views.of.values() if hasattr(muon, "views") else muon.stepped()
    return sum(step_cost(each, by_matrix=True) for each in stepped)


@pytest.mark.parametrize("name", ["zero-1", "gemini", "fsdp"])
def test_ranks_share_the_work_of_many_buckets_by_its_cost(name):
    costs = assert_equals_one_process(CASE, SETTINGS[name], tell=costs_here)
    assert max(costs) < 1.1 * sum(costs) / len(costs)
