"""Optimizer state that exists before `boost` is cut where it is: a device gets its part, and training goes on."""

import copy

import pytest
import torch
import torch.distributed as dist
from device_smoke import Case, batch_of, make_deep_model, part_of
from simulated_device import NAME, run_on_devices

from booster_core.ranks import DistCoordinator
from booster_core.state import MASTER
from booster_runtime import full_gradient
from booster_testing.compare import assert_same_tensors, tolerance_for

CASES = {
    "fsdp": Case("fsdp"),
    "fsdp, offload": Case("fsdp", {"cpu_offload": True}),
    "zero 1": Case("zero", {"stage": 1}),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 15}),
    "tensor parallel": Case("hybrid", {"tp_size": 2}),
    "tensor parallel, zero 1": Case("hybrid", {"tp_size": 2, "zero_stage": 1}, world_size=4),
    "pipeline": Case("hybrid", {"pp_size": 2, "example_batch": batch_of(0)}),
    "zero 3": Case("hybrid", {"zero_stage": 3}),
}
DEFAULT = {("fsdp", "bf16"), ("tensor parallel, zero 1", "bf16"), ("pipeline", "fp32"), ("zero 3", "fp32")}
FEW_BYTES = 1 << 19
"""For what offload brings to the device on its way: a sixth of the model."""
STEPS = 2


def adamw(model):
    """Return an optimizer whose epsilon exceeds rounding errors of gradients."""
    return [torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-2)]


def muon(model):
    """Return an optimizer that needs whole matrices."""
    return [torch.optim.Muon([each for each in model.parameters() if each.requires_grad and each.ndim == 2], lr=1e-2)]


def muon_and_adamw(model):
    """Return an optimizer for the matrices, and one for the rest."""
    others = [each for each in model.parameters() if each.requires_grad and each.ndim != 2]
    return [*muon(model), torch.optim.AdamW(others, lr=1e-2, eps=1e-2)]


def gradients_of(model, number):
    """Return the gradients of a whole batch in one process."""
    model.zero_grad()
    model(**batch_of(number)).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def step_alone(model, optimizers, gradients):
    """Step in one process with given gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    for each in optimizers:
        each.step()


def whole_state(model, optimizers):
    """Return the trained parameters and the optimizers' large state of one process, by name and state."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {(name, None): parameter.detach().clone() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if value.shape == parameter.shape:
                    found[name, key] = value.clone()
    return found


def shards_here(booster, model, expected):
    """Return this rank's parts of what is expected, by key: in fp32, so masters where parameters are narrow."""
    adapter, found = booster.state_adapter(model), []
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        key = shard.name, None if shard.state == MASTER else shard.state
        if key in expected and shard.dtype == torch.float32:
            found.append((key, shard, shard.data.cpu().flatten()))
    return found


def backward_boosted(booster, case, model, optimizer, number):
    index, size = booster.plugin.data_parallel_coordinates(DistCoordinator())
    batch = {name: tensor[index::size] for name, tensor in batch_of(number).items()}
    if case.has_pipeline:
        booster.execute_pipeline(iter([batch]), model, lambda output, _: output.loss, optimizer)
    else:
        loss = model(**{name: tensor.to(NAME) for name, tensor in batch.items()}).loss
        booster.backward(loss, optimizer)


def go_on(case, precision, make_optimizers):
    """Train in one process, boost, step; compare with one process, and return the peak of `boost` and what is kept.

    Gradients are compared in fp32. The step is that of one process from the same gradients, also for bf16, whose
    roundings would hide what the state changes.
    """
    model = make_deep_model(seed=0)
    optimizers = make_optimizers(model)
    for number in range(STEPS):
        step_alone(model, optimizers, gradients_of(model, number))
    model.zero_grad()
    before = whole_state(model, optimizers)
    alone = copy.deepcopy(model)
    optimizers_alone = make_optimizers(alone)
    for each, own in zip(optimizers_alone, optimizers, strict=True):
        each.load_state_dict(copy.deepcopy(own.state_dict()))

    allocated = torch.simulated.memory_allocated()
    torch.simulated.reset_peak_memory_stats()
    booster = case.make_booster(NAME, precision)
    model, optimizer, *_ = booster.boost(model, optimizers if len(optimizers) > 1 else optimizers[0])
    peak, kept = torch.simulated.max_memory_allocated() - allocated, torch.simulated.memory_allocated() - allocated

    held = shards_here(booster, model, before)
    wrong = [key for key, shard, data in held if not torch.equal(data, part_of(before[key], shard).flatten())]
    assert not wrong
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {key for key, *_ in held})
    assert set().union(*everywhere) == {*before}

    backward_boosted(booster, case, model, optimizer, STEPS)
    gradients = {name: full_gradient(booster, model, name).cpu().float() for name, state in before if state is None}
    if precision == "fp32":
        assert_same_tensors(gradients, gradients_of(alone, STEPS), tolerance_for(torch.float32))
    for each in model.boosted_optimizers:
        each.step()
    step_alone(alone, optimizers_alone, gradients)
    after = whole_state(alone, optimizers_alone)
    found, expected = {}, {}
    for key, shard, data in shards_here(booster, model, before):
        start, end = (part_of(each[key], shard).flatten() for each in (before, after))
        part = f"{key} {shard.box} {shard.flat}"
        # Of parameters their updates: what they were would hide those.
        found[part] = data - (start if key[1] is None else 0)
        expected[part] = end - (start if key[1] is None else 0)
    assert_same_tensors(found, expected, tolerance_for(torch.float32))
    return peak, kept


def check(name, precision, make_optimizers, library):
    case = CASES[name]
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    for peak, kept in run_on_devices(go_on, case.world_size, library, case, precision, make_optimizers, **limits):
        assert peak <= (kept + FEW_BYTES if name == "fsdp, offload" else 1.1 * kept), (peak, kept)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in DEFAULT else pytest.mark.slow)
        for name in CASES
        for precision in ("fp32", "bf16")
    ],
)
def test_state_is_cut_where_it_is_and_the_next_step_is_that_of_one_process(name, precision, simulated_device):
    check(name, precision, adamw, simulated_device)


@pytest.mark.parametrize(("name", "make_optimizers"), [("fsdp", muon), ("gemini", muon_and_adamw)])
def test_the_state_of_whole_matrices_goes_to_the_rank_that_steps_them(name, make_optimizers, simulated_device):
    check(name, "fp32", make_optimizers, simulated_device)
