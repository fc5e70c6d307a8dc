"""Muon for the matrices and AdamW for the rest, over ranks that have parts of matrices, layers and sequences.

Compared with plain torch in one process. Muon updates whole matrices, which come together for its step.
"""

from __future__ import annotations

import pytest
import torch
from handwritten_gpts import Config, FusedGPT, policy
from matrix import matrix
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster
from booster_core.errors import BoosterError
from booster_core.plugin import unwrap_model
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

STEPS, MAX_NORM, BATCH = 4, 0.5, 4
MESHES = {
    "tp": (2, {"tp_size": 2}),
    "tp uneven": (4, {"tp_size": 4}),
    "tp zero-1": (4, {"tp_size": 2, "zero_stage": 1}),
    "tp offloaded": (4, {"tp_size": 2, "zero_stage": 1, "cpu_offload": True}),
    "tp zero-2": (4, {"tp_size": 2, "zero_stage": 2}),
    "tp zero-3": (4, {"tp_size": 2, "zero_stage": 3}),
    "all_to_all": (2, {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", "zero_stage": 1}),
    "pp": (2, {"pp_size": 2, "num_microbatches": 2}),
    "pp zero-1": (4, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    "tp pp": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zbv"}),
    "zero-3": (2, {"zero_stage": 3}),
    "shared keys": (4, {"tp_size": 4, "sequence_parallelism_mode": "split_gather"}),
}


def batch(step):
    ids = torch.randint(66, (BATCH, 17), generator=torch.Generator().manual_seed(step))
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def loss_of(model, idx, targets):
    if hasattr(unwrap_model(model), "transformer"):
        return model(idx, targets)[1]
    return functional.cross_entropy(model(input_ids=idx).logits.flatten(0, 1), targets.flatten())


def make(mesh):
    """Return a model and its optimizers, in fp64: Muon's steps in bf16 make much of other roundings in fp32."""
    torch.manual_seed(3)
    if mesh == "shared keys":  # two queries for a key, of which there are fewer than ranks
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 24}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=66, **sizes, **heads)).double()
        layers = model.model.layers
    else:
        model = FusedGPT(Config(n_layer=4 if "pp_style" in MESHES[mesh][1] else 2)).double()
        layers = model.transformer.h
    matrices = [parameter for parameter in layers.parameters() if parameter.dim() == 2]
    held = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def one_process(mesh):
    model, optimizers = make(mesh)
    norms = []
    for step in range(STEPS):
        loss_of(model, **batch(step)).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for each in optimizers:
            each.step()
            each.zero_grad()
    return dict(model.state_dict()), norms, gradients


def boosted_with(mesh):
    options = dict(MESHES[mesh][1])
    model, optimizers = make(mesh)
    if isinstance(model, FusedGPT) and mesh != "zero-3":  # transformers' models have a policy and dummy inputs
        options |= {"custom_policy": policy(), "example_batch": batch(0)}
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model, boosted, *_ = booster.boost(model, optimizers)
    return booster, model, boosted


def backward(booster, model, boosted, step):
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    own = {name: each.chunk(size)[rank] for name, each in batch(step).items()}
    if booster.plugin.config.pipeline.size > 1:
        booster.execute_pipeline(iter([own]), model, lambda outputs, _: outputs[1], boosted)
    else:
        booster.backward(loss_of(model, **own), boosted[step % 2])


def trained(root, mesh):
    booster, model, boosted = boosted_with(mesh)
    norms = []
    for step in range(STEPS):
        if step == STEPS // 2:  # go on in new objects, from one checkpoint of both
            booster.save_checkpoint(root, model=model, optimizer=boosted, step=step)
            booster, model, boosted = boosted_with(mesh)
            booster.load_checkpoint(root, model=model, optimizer=boosted)
        backward(booster, model, boosted, step)
        if step == STEPS - 1:
            names = [name for name, _ in make(mesh)[0].named_parameters()]
            gradients = {name: full_gradient(booster, model, name).clone() for name in names}
        norms.append(float(boosted[step % 2].clip_grad_by_norm(MAX_NORM)))
        for each in boosted:
            each.step()
            each.zero_grad()
    return whole_model(booster, model), norms, gradients


@matrix(["tp", "pp zero-1"], mesh=MESHES)
def test_training_equals_one_process_through_a_checkpoint(mesh, tmp_path):
    expected, expected_norms, expected_gradients = one_process(mesh)
    for weights, norms, gradients in run_on_ranks(trained, MESHES[mesh][0], tmp_path / "run", mesh):
        assert_same_tensors(weights, expected, tolerance_for(torch.float32))
        assert_same_tensors(gradients, expected_gradients, tolerance_for(torch.float32))
        assert norms == pytest.approx(expected_norms, rel=1e-5)


class Scaling(torch.optim.Optimizer):
    """Scales updates by the norms of whole parameters, and counts steps in plain numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-6) / state["count"]
                    parameter.sub_(parameter.grad * group["lr"] * ratio)


OPTIMIZERS = {"Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01), "Scaling": Scaling}


def trained_by_one(name, root):
    def boosted():
        model, _ = make("tp")
        plugin = HybridParallelPlugin(tp_size=2, custom_policy=policy(), example_batch=batch(0))
        booster = Booster("cpu", plugin=plugin)
        model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model.parameters()))
        return booster, model, optimizer

    booster, model, optimizer = boosted()
    for step in range(STEPS):
        if step == STEPS // 2:
            booster.save_checkpoint(root, model=model, optimizer=optimizer, step=step)
            booster, model, optimizer = boosted()
            booster.load_checkpoint(root, model=model, optimizer=optimizer)
        booster.backward(loss_of(model, **batch(step)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


@matrix(["Adafactor"], name=OPTIMIZERS)
def test_norms_and_factors_are_those_of_whole_parameters(name, tmp_path):
    model, _ = make("tp")
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        loss_of(model, **batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_on_ranks(trained_by_one, 2, name, tmp_path / "run"):
        assert_same_tensors(weights, dict(model.state_dict()), tolerance_for(torch.float32))


class Failing(torch.optim.Muon):
    """Runs out of memory, from some time on."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            msg = "no memory is left"
            raise RuntimeError(msg)
        return super().step(closure)


def fail_on_one_rank():
    model, _ = make("tp")
    matrices = [parameter for parameter in model.transformer.h.parameters() if parameter.dim() == 2]
    plugin = HybridParallelPlugin(tp_size=2, custom_policy=policy(), example_batch=batch(0))
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, Failing(matrices))
    booster.backward(loss_of(model, **batch(0)), optimizer)
    before = [list(group["params"]) for group in optimizer.param_groups]
    optimizer.unwrap().fails = torch.distributed.get_rank() == 1
    match = "no memory is left" if torch.distributed.get_rank() else "Failing has failed on another rank"
    with pytest.raises(RuntimeError if torch.distributed.get_rank() else BoosterError, match=match):
        optimizer.step()
    return all(
        one is other
        for group, kept in zip(optimizer.param_groups, before, strict=True)
        for one, other in zip(group["params"], kept, strict=True)
    )


def test_a_step_that_fails_on_one_rank_raises_on_all_and_leaves_groups_as_they_were():
    assert run_on_ranks(fail_on_one_rank, 2) == [True, True]
