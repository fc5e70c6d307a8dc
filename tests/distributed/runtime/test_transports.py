"""Which transport a group uses, and that results don't depend on it."""

import os

import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.collectives.transports import override, transport_of
from booster_testing import expect_on_ranks, run_on_ranks

TRANSPORTS = ["torch", "direct"]


def term(rank, numel, dtype):
    """Return values whose sum depends on its order, as floating sums do."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)).to(
        dtype
    )


def combined(numel, dtype, op_name):
    op = getattr(dist.ReduceOp, op_name)
    tensor = term(dist.get_rank(), numel, dtype)
    collectives.all_reduce(tensor, op).wait()
    return tensor


def in_rank_order(size, numel, dtype, op_name):
    """Return the sum or average in rank order, in fp32 if the dtype is narrower."""
    wide = torch.promote_types(dtype, torch.float32)
    total = term(0, numel, dtype).to(wide)
    for rank in range(1, size):
        total = total + term(rank, numel, dtype).to(wide)
    return (total * (1.0 / size) if op_name == "AVG" else total).to(dtype)


@matrix(
    2,
    dtype=named([torch.float32, torch.bfloat16, torch.float16], str),
    op_name=["SUM", "AVG"],
    num_ranks=[2, 3, 4],
    transport=TRANSPORTS,
)
def test_all_reduce_sums_in_rank_order_and_fp32(monkeypatch, transport, num_ranks, op_name, dtype):
    monkeypatch.setenv("BOOSTER_TRANSPORT", transport)
    for numel in (1, 1000, 100_003):  # small and large ones travel differently
        expected = in_rank_order(num_ranks, numel, dtype, op_name)
        for found in run_on_ranks(combined, num_ranks, numel, dtype, op_name):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def averages_large_halves():
    tensor = torch.full((200_000,), 60_000.0, dtype=torch.float16)
    collectives.all_reduce(tensor, dist.ReduceOp.AVG).wait()
    return tensor.isfinite().all().item() and bool((tensor == torch.tensor(60_000.0).half()).all())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_average_of_halves_does_not_overflow_in_the_sum(monkeypatch, transport, num_ranks):
    monkeypatch.setenv("BOOSTER_TRANSPORT", transport)
    assert all(run_on_ranks(averages_large_halves, num_ranks))


def scatters_to_narrow():
    size, rank = dist.get_world_size(), dist.get_rank()
    source = term(rank, 4 * size, torch.float32)
    before = source.clone()
    out = torch.empty(4, dtype=torch.bfloat16)
    collectives.reduce_scatter(source, range(0, 4 * size + 1, 4), out).wait()
    return torch.equal(source, before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reduce_scatter_into_a_narrower_dtype_keeps_the_source(monkeypatch, transport):
    monkeypatch.setenv("BOOSTER_TRANSPORT", transport)
    assert all(run_on_ranks(scatters_to_narrow, 3))


def waits_in_another_order_on_each_rank(rounds):
    """Large sums on three ranks have two halves; neither the order of waits nor a barrier may block the second."""
    rank = dist.get_rank()
    for index in range(rounds):
        tensors = [torch.full((50_000,), float(rank + part)) for part in range(3)]
        works = [collectives.all_reduce(tensor) for tensor in tensors]
        if rank == 1:
            works[0].wait()
        if index % 3 == 0 and rank != 2:
            dist.barrier()
        for part in torch.randperm(3, generator=torch.Generator().manual_seed(rank)).tolist():
            works[part].wait()
        if index % 3 == 0 and rank == 2:
            dist.barrier()
        for part, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((50_000,), 3.0 + 3 * part))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_may_wait_for_large_sums_in_any_order(monkeypatch, transport):
    monkeypatch.setenv("BOOSTER_TRANSPORT", transport)
    run_on_ranks(waits_in_another_order_on_each_rank, 3, 12)


def name_of_transport():
    collectives.all_reduce(torch.ones(1)).wait()
    return transport_of(None).name


@pytest.mark.parametrize(("asked", "used"), [("torch", "torch"), ("direct", "direct"), ("auto", "direct")])
def test_the_environment_chooses_the_transport(monkeypatch, asked, used):
    monkeypatch.setenv("BOOSTER_TRANSPORT", asked)
    assert run_on_ranks(name_of_transport, 2) == [used, used]


def test_ranks_read_memory_by_default(monkeypatch):
    monkeypatch.delenv("BOOSTER_TRANSPORT")
    assert run_on_ranks(name_of_transport, 2) == ["direct", "direct"]


def sets_its_own(variable, *values):
    """Set the environment variable to another value on each rank, and use a group."""
    value = values[dist.get_rank()]
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
    return name_of_transport()


def test_one_rank_that_asks_for_torch_decides_for_all():
    assert run_on_ranks(sets_its_own, 2, "BOOSTER_TRANSPORT", "auto", "torch") == ["torch", "torch"]


@pytest.mark.parametrize(
    ("variable", "values", "message"),
    [
        ("BOOSTER_TRANSPORT", ("direct", "torch"), r"direct on ranks \[0\] and torch on ranks \[1\]"),
        ("BOOSTER_TRANSPORT", ("auto", "shm"), "Rank 1: BOOSTER_TRANSPORT='shm' must be auto"),
        ("BOOSTER_DEBUG", ("collectives", None), r"BOOSTER_DEBUG=collectives is set on ranks \[0\] only"),
        ("BOOSTER_DEBUG", ("all", None), "Rank 0: BOOSTER_DEBUG='all' lists 'all'; the only mode is 'collectives'"),
        ("BOOSTER_DIRECT_COLLECTIVES", (None, "0"), "Rank 1: BOOSTER_DIRECT_COLLECTIVES is not read any more"),
    ],
)
def test_contradicting_settings_raise_on_every_rank(variable, values, message):
    expect_on_ranks(ConfigError, message, sets_its_own, 2, variable, *values)


def overrides():
    names, before = [], name_of_transport()
    for name in ("direct", "torch", "direct"):
        with override(name):
            names.append(name_of_transport())
    assert name_of_transport() == before
    return names


def test_override_switches_every_group_inside_the_block():
    assert run_on_ranks(overrides, 2) == [["direct", "torch", "direct"]] * 2


def test_a_collective_without_a_process_group_says_what_to_start():
    with pytest.raises(RuntimeError, match="needs a process group"):
        collectives.all_reduce(torch.ones(1))
