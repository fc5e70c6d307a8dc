"""The engine asks for every block before it uses it: a memory that takes each away at once changes no bit."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from restless_memory import RestlessMemory

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_gemini import plugin as plugin_module
from booster_runtime import full_gradient, set_full_gradient
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_zero.engine import Role

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),  # keeps state that is not elementwise
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
}


def train(memory, precision, name, folder, steps=3):
    """Train, and return losses, norms, gradients of the last step, and the state at the end."""
    make = plugin_module.make_memory if memory is None else lambda *_: memory()
    with mock.patch.object(plugin_module, "make_memory", make):
        booster = Booster("cpu", precision, GeminiPlugin(min_chunk_bytes=8192))
        torch.manual_seed(0)
        model = tiny_llama()
        names = [n for n, _ in model.named_parameters()]
        model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](list(model.parameters())))
        rank, size = dist.get_rank(), dist.get_world_size()
        seen = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for micro in range(2):
                tokens = torch.randint(64, (2 * size, 8), generator=generator)[rank::size].contiguous()
                with booster.no_sync(model) if micro == 0 else contextlib.nullcontext():
                    loss = model(input_ids=tokens, labels=tokens).loss
                    booster.backward(loss, optimizer)
            gradients = {n: full_gradient(booster, model, n) for n in names}
            if step == 1:
                for n, gradient in gradients.items():
                    set_full_gradient(booster, model, n, 2 * gradient)
                gradients |= {f"{n}, set": full_gradient(booster, model, n) for n in names}
                assert all(torch.equal(gradients[f"{n}, set"], 2 * gradients[n]) for n in names)
            seen.append((loss.item(), float(optimizer.clip_grad_by_norm(0.5)), gradients))
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            booster.save_model(model, f"{folder}/m", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/o", shard=True)
            booster.load_model(model, f"{folder}/m")
            booster.load_optimizer(optimizer, f"{folder}/o")
            tokens = torch.arange(16).view(2, 8)
            booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
            optimizer.step()
        return seen, model.state_dict(), model.gatherer.memory


def compare(precision, name, folder):
    still = train(None, precision, name, folder and f"{folder}/still")
    moved = train(RestlessMemory, precision, name, folder and f"{folder}/moved")
    for (loss, norm, gradients), (other_loss, other_norm, others) in zip(still[0], moved[0], strict=True):
        assert (loss, norm) == (other_loss, other_norm)
        assert all(torch.equal(others[n], gradient) for n, gradient in gradients.items())
    assert all(torch.equal(moved[1][n], tensor) for n, tensor in still[1].items())
    assert moved[2].faults == []
    assert not any(moved[2].uses.values())
    assert moved[2].reserved == 0
    return moved[2].roles()


@matrix(["None-1"], precision=[None, "bf16", "fp16"], world_size=[1, 2])
def test_blocks_that_come_and_go_change_no_bit(world_size, precision):
    for roles in run_on_ranks(compare, world_size, precision, "adamw", None):
        assert roles == {*Role}


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adafactor", "muon"])
def test_other_optimizers_find_their_state_too(name):
    run_on_ranks(compare, 2, None, name, None)


@pytest.mark.parametrize("precision", [pytest.param(None, marks=pytest.mark.slow), "bf16"])
def test_state_is_saved_and_loaded_from_where_it_is(precision, tmp_path):
    run_on_ranks(compare, 2, precision, "adamw", str(tmp_path))
