"""What `boost` does on devices: each gets its part of parameters and optimizer state, little more, and trains on."""

import copy

import pytest
import torch
import torch.distributed as dist
from device_smoke import Case, backward, batch_of, make_deep_model, part_of
from matrix import matrix
from simulated_device import NAME, on_devices

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.state import MASTER
from booster_runtime import full_gradient
from booster_testing.compare import assert_same_tensors, tolerance_for

_PIPELINE = {"pp_size": 2, "example_batch": batch_of(0)}
_SMALL_CHUNKS = {"min_chunk_bytes": 1 << 15}
CASES = {
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "fsdp, offload": Case("fsdp", {"cpu_offload": True}),
    "zero 1": Case("zero", {"stage": 1}),
    "zero 2": Case("zero", {"stage": 2, "bucket_bytes": 1 << 16}),
    "zero 2, offload": Case("zero", {"stage": 2, "offload": "cpu"}),
    "zero 3": Case("hybrid", {"zero_stage": 3}),
    "gemini": Case("gemini", _SMALL_CHUNKS),
    "gemini, offload": Case("gemini", {**_SMALL_CHUNKS, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "tensor parallel": Case("hybrid", {"tp_size": 2}),
    "tensor parallel, zero 1": Case("hybrid", {"tp_size": 2, "zero_stage": 1}, world_size=4),
    "pipeline": Case("hybrid", _PIPELINE),
    "pipeline, zero 1": Case("hybrid", {**_PIPELINE, "zero_stage": 1}, world_size=4),
    "tensor parallel, pipeline": Case("hybrid", {**_PIPELINE, "tp_size": 2}, world_size=4),
}
FEW_BYTES = 1 << 19
"""For what offload brings to the device on its way: a sixth of the model."""
CHECKED = "tensor parallel, pipeline"
"""Of which the layers are run with the example to see that they may be split. Large matrices share memory for that, but
none of these is large: it takes less than the whole model."""


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


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients_of(model, number):
    """Return the gradients of a whole batch in one process."""
    model.zero_grad()
    model(**batch_of(number)).loss.backward()
    return {name: each.grad for name, each in trained(model).items()}


def step_alone(model, optimizers, gradients):
    """Step in one process with given gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    for each in optimizers:
        each.step()


def whole_state(model, optimizers):
    """Return the model's tensors and the optimizers' large state of one process, by name and state."""
    found = {(name, None): value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for name, parameter in trained(model).items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if value.shape == parameter.shape:
                    found[name, key] = value.clone()
    return found


def shards_here(booster, model, expected):
    """Return this rank's parts of what is expected, by key; of narrow parameters also their masters."""
    adapter, found = booster.state_adapter(model), []
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        key = shard.name, None if shard.state == MASTER else shard.state
        if key in expected:
            found.append((key, shard, shard.data.cpu().flatten()))
    return found


def go_on(name, precision, make_optimizers, steps):
    """Train some steps in one process, boost, step, and compare with one process.

    Without steps before, each rank has other values, of which those of the first rank count. Gradients are compared in
    fp32. The step is that of one process from the same gradients, also for bf16, whose roundings would hide what the
    state changes. `boost` takes little more memory than stays on the device.
    """
    case = CASES[name]
    alone = make_deep_model(seed=0)
    optimizers_alone = make_optimizers(alone)
    for number in range(steps):
        step_alone(alone, optimizers_alone, gradients_of(alone, number))
    alone.zero_grad()
    before = whole_state(alone, optimizers_alone)
    model, optimizers = copy.deepcopy((alone, optimizers_alone))
    if not steps:
        model = make_deep_model(seed=dist.get_rank())
        optimizers = make_optimizers(model)
    whole = sum(parameter.nbytes for parameter in model.parameters())

    allocated = torch.simulated.memory_allocated()
    torch.simulated.reset_peak_memory_stats()
    booster = case.make_booster(NAME, precision)
    model, optimizer, *_ = booster.boost(model, optimizers if len(optimizers) > 1 else optimizers[0])
    peak, kept = torch.simulated.max_memory_allocated() - allocated, torch.simulated.memory_allocated() - allocated

    held = shards_here(booster, model, before)
    wrong = [
        (key, shard.dtype)
        for key, shard, data in held
        if not torch.equal(data, part_of(before[key], shard).flatten().to(shard.dtype))
    ]
    assert not wrong
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {key for key, *_ in held})
    assert set().union(*everywhere) == {*before}

    backward(case, booster, model, optimizer, steps)
    gradients = {name: full_gradient(booster, model, name).cpu().float() for name in trained(alone)}
    if precision == "fp32":
        assert_same_tensors(gradients, gradients_of(alone, steps), tolerance_for(torch.float32))
    for each in model.boosted_optimizers:
        each.step()
    step_alone(alone, optimizers_alone, gradients)
    after = whole_state(alone, optimizers_alone)
    found, expected = {}, {}
    for key, shard, data in shards_here(booster, model, after):
        if shard.dtype == torch.float32:
            end = part_of(after[key], shard).flatten()
            # Of parameters their updates: what they were would hide those.
            start = part_of(before[key], shard).flatten() if key[1] is None else 0
            part = f"{key} {shard.box} {shard.flat}"
            found[part], expected[part] = data - start, end - start
    assert_same_tensors(found, expected, tolerance_for(torch.float32))
    keeps_little = name in ("gemini, offload", "fsdp, offload")
    limit = kept + FEW_BYTES if keeps_little else max(whole, 1.1 * kept) if name == CHECKED else 1.1 * kept
    assert peak <= limit, (peak, kept, whole)


DEFAULT = [
    "zero 2, offload-bf16-0",
    "fsdp-bf16-2",
    "tensor parallel, zero 1-bf16-2",
    "pipeline-fp32-2",
    "zero 3-fp32-2",
]


LIMITS = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}


@matrix(DEFAULT, 2, name=CASES, precision=["fp32", "bf16"], steps=[0, 2])
@on_devices(lambda name: CASES[name].world_size, **LIMITS)
def test_a_device_gets_its_part_and_the_next_step_is_that_of_one_process(name, precision, steps, simulated_device):
    go_on(name, precision, adamw, steps)


@pytest.mark.parametrize(("name", "make_optimizers"), [("fsdp", muon), ("gemini", muon_and_adamw)])
@on_devices(2, **LIMITS)
def test_the_state_of_whole_matrices_goes_to_the_rank_that_steps_them(name, make_optimizers, simulated_device):
    go_on(name, "fp32", make_optimizers, 2)


@on_devices(2, timeout_seconds=120.0, group_timeout_seconds=20.0)
def test_ranks_that_disagree_get_the_first_ranks_values_or_an_error(simulated_device):
    """Boost a model of whose ranks one has optimizer state, then different models."""
    rank = dist.get_rank()

    def boost_linear(*, width, has_state):
        model = torch.nn.Linear(width, 3, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if has_state:
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            optimizer.zero_grad()
        model, *_ = Booster(NAME, plugin="zero").boost(model, optimizer)
        return model.weight.detach().cpu()

    weights = boost_linear(width=4, has_state=rank == 1)
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    with pytest.raises(ConfigError, match=r"'weight'`: '\(3, 4\), .* on rank 0, '\(3, 5\), .* on rank 1"):
        boost_linear(width=4 + rank, has_state=False)
