"""What a device holds while `boost` shards an eager model from the host: what this rank keeps, and little more."""

import pytest
import torch
import torch.distributed as dist
from device_smoke import Case, batch_of, make_deep_model, part_of
from matrix import matrix
from simulated_device import NAME, run_on_devices

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.state import MASTER

CASES = {
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "fsdp, offload": Case("fsdp", {"cpu_offload": True}),
    "zero 1": Case("zero", {"stage": 1}),
    "zero 2": Case("zero", {"stage": 2, "bucket_bytes": 1 << 16}),
    "zero 2, offload": Case("zero", {"stage": 2, "offload": "cpu"}),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 15}),
    "gemini, offload": Case(
        "gemini", {"min_chunk_bytes": 1 << 15, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    ),
    "tensor parallel": Case("hybrid", {"tp_size": 2}),
    "pipeline": Case("hybrid", {"pp_size": 2, "example_batch": batch_of(0)}),
    "pipeline, zero 1": Case("hybrid", {"pp_size": 2, "zero_stage": 1, "example_batch": batch_of(0)}, world_size=4),
    "tensor parallel, pipeline": Case(
        "hybrid", {"tp_size": 2, "pp_size": 2, "example_batch": batch_of(0)}, world_size=4
    ),
}
FEW_BYTES = 1 << 19
"""For what offload brings to the device on its way: a sixth of the model."""
CHECKED = "tensor parallel, pipeline"
"""Of which the layers are run with the example to see that they may be split. Large matrices share memory for that, but
none of these is large: it takes less than the whole model."""


def boost(case, precision):
    """Boost other values on each rank, compare with rank 0's, and return bytes: the peak, what stays, the model."""
    model = make_deep_model(seed=dist.get_rank())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    before = torch.simulated.memory_allocated()
    torch.simulated.reset_peak_memory_stats()
    booster = case.make_booster(NAME, precision)
    model, *_ = booster.boost(model, torch.optim.AdamW(trained))
    peak, kept = torch.simulated.max_memory_allocated() - before, torch.simulated.memory_allocated() - before
    expected = make_deep_model(seed=0).state_dict()
    adapter = booster.state_adapter(model)
    seen = set()
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        if shard.state in (None, MASTER):
            values = part_of(expected[shard.name], shard).to(shard.dtype)
            assert torch.equal(shard.data.cpu().view(values.shape), values), (shard.name, shard.state)
            seen.add(shard.name)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen)
    assert set().union(*everywhere) == expected.keys() - {"lm_head.weight"}
    return peak, kept, whole


@matrix(
    ["zero 2, offload-bf16"],
    name=CASES,
    precision=["fp32", "bf16"],
)
def test_boost_holds_what_this_rank_keeps_and_little_more(name, precision, simulated_device):
    case = CASES[name]
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    for peak, kept, whole in run_on_devices(boost, case.world_size, simulated_device, case, precision, **limits):
        keeps_little = name.startswith("gemini, offload") or name == "fsdp, offload"
        limit = kept + FEW_BYTES if keeps_little else whole if name == CHECKED else 1.1 * kept
        assert peak <= limit, (peak, kept, whole)


def boost_linear(*, width, has_state):
    model = torch.nn.Linear(width, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if has_state:
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
    booster = Booster(NAME, plugin="zero")
    model, *_ = booster.boost(model, optimizer)
    return model.weight.detach().cpu()


def boost_what_ranks_disagree_on():
    """Boost a model of whose ranks one has optimizer state, then different models; return the weights of the first."""
    rank = dist.get_rank()
    weights = boost_linear(width=4, has_state=rank == 1)
    with pytest.raises(ConfigError, match=r"'weight'`: '\(3, 4\), .* on rank 0, '\(3, 5\), .* on rank 1"):
        boost_linear(width=4 + rank, has_state=False)
    return weights


def test_ranks_that_disagree_get_the_first_ranks_values_or_an_error(simulated_device):
    first, second = run_on_devices(
        boost_what_ranks_disagree_on, 2, simulated_device, timeout_seconds=120.0, group_timeout_seconds=20.0
    )
    assert torch.equal(first, second)
