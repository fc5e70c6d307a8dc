"""The DDP plugin: options, compression hooks, unused parameters, buffers and `no_sync`."""

import os
import tempfile
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, train_boosted, train_plainly
from free_ports import free_port
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster, PrecisionPolicy
from booster_core.errors import ConfigError, GradientError, MissingRanksError
from booster_ddp import TorchDDPPlugin
from booster_ddp.plugin import check_sync_batchnorm
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import EXACT, Tolerance, assert_same_tensors, tolerance_for
from booster_testing.models import TinyMixedBag, TinyMLP


def boost(model, lr=0.1, precision=None, **options):
    booster = Booster("cpu", precision, TorchDDPPlugin(**options))
    trained = [p for p in model.parameters() if p.requires_grad]
    boosted = booster.boost(model, torch.optim.SGD(trained, lr=lr) if trained else None)
    return booster, boosted.model, boosted.optimizer


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def batch(step):
    """Return this rank's samples."""
    return rows(step, dist.get_rank())


CASE = Case(build=TinyMLP, batch=rows, steps=4, max_norm=None)


@pytest.mark.parametrize(
    ("hook", "relative"),
    [
        ("allreduce", 1e-6),
        ("fp16_compress", 2e-3),  # 11 bits
        ("bf16_compress", 2e-2),  # 8 bits
    ],
)
def test_compression_hooks_average(hook, relative):
    tolerance = Tolerance(relative=relative, reason="what travels is rounded once")
    assert_equals_one_process(replace(CASE, tolerance=tolerance), Setting(TorchDDPPlugin, {"comm_hook": hook}))


def powersgd():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    state = PowerSGDState(process_group=None, start_powerSGD_iter=2, matrix_approximation_rank=2)
    setting = Setting(TorchDDPPlugin, {"comm_hook": "powersgd", "comm_hook_state": state})
    return train_boosted(replace(CASE, steps=6), setting).trained.gradients, state.iter


def test_powersgd_gives_every_rank_the_same_gradients():
    (first, iterations), (second, _) = run_on_ranks(powersgd, 2)
    assert iterations >= 4
    for ours, theirs in zip(first, second, strict=True):
        assert_same_tensors(ours, theirs, EXACT)


def test_narrow_reduce_dtype_registers_a_compression_hook():
    setting = Setting(TorchDDPPlugin, precision=PrecisionPolicy(reduce_dtype=torch.bfloat16))
    for result in run_on_ranks(train_boosted, 2, CASE, setting):
        for found, expected in zip(result.trained.gradients, train_plainly(CASE, 2).gradients, strict=True):
            ours, theirs = (torch.cat([each.flatten() for each in part.values()]) for part in (found, expected))
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
            assert 1e-4 < difference < 2e-2, "all steps reduce in bf16, the first too"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"comm_hook": "gzip"}, "Unknown `comm_hook='gzip'`. Use one of"),
        ({"static_graph": True, "find_unused_parameters": True}, "finds unused parameters by itself"),
        ({"comm_hook_state": object()}, "without `comm_hook`"),
    ],
)
def test_invalid_options_raise(options, match):
    with pytest.raises(ConfigError, match=match):
        TorchDDPPlugin(**options)


def test_comm_hook_of_wrong_type_raises():
    with pytest.raises(TypeError, match="got `int`"):
        TorchDDPPlugin(comm_hook=3)


def test_reduce_dtype_that_contradicts_comm_hook_raises():
    policy = PrecisionPolicy(reduce_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="contradict each other"):
        Booster("cpu", policy, TorchDDPPlugin(comm_hook="fp16_compress"))


@on_ranks(2)
def test_options_reach_ddp():
    _booster, model, _optimizer = boost(
        TinyMLP(), gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=3, find_unused_parameters=True
    )
    ddp = model.ddp
    assert isinstance(ddp, DistributedDataParallel)
    assert (
        ddp.gradient_as_bucket_view,
        ddp.broadcast_buffers,
        ddp.bucket_bytes_cap,
        ddp.find_unused_parameters,
        ddp.static_graph,
    ) == (True, False, 3 * 2**20, True, False)


def first_step_decides(unused_on):
    torch.manual_seed(0)
    model = TinyMixedBag(unused=False)
    booster, boosted, optimizer = boost(model)
    found = []
    for _step in range(3):
        tokens = torch.randint(16, (2, 4))
        hidden = boosted(tokens)
        loss = hidden.mean()
        if dist.get_rank() in unused_on:
            loss = boosted(tokens).detach().mean() + model.embedding.weight.sum() * 0.1
        booster.backward(loss, optimizer)
        found.append(boosted.ddp.find_unused_parameters)
        optimizer.step()
        optimizer.zero_grad()
    return found, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_first_step_detects_that_all_parameters_are_used():
    results = run_on_ranks(first_step_decides, 2, ())
    assert [found for found, _ in results] == [[True, False, False]] * 2
    assert torch.equal(results[0][1], results[1][1])


@raises_on_ranks(GradientError, "'extra.weight', 'extra.bias'.*find_unused_parameters=True", 2)
def test_parameter_that_becomes_unused_raises_before_the_step():
    torch.manual_seed(0)
    model = TinyMLP()
    extra = nn.Linear(8, 4)
    model.add_module("extra", extra)
    original = model.forward
    model.forward = lambda x, use: original(x) + (extra(x) if use else 0)
    booster, boosted, optimizer = boost(model)
    for use in (True, True, False):
        own = batch(0)
        booster.backward(boosted(own, use).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def warnings_of_torch():
    """Return what torch's reducer writes to the standard error in two steps that use all parameters."""
    with tempfile.TemporaryFile() as log:
        before = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            train_boosted(replace(CASE, steps=2), Setting(TorchDDPPlugin))
        finally:
            os.dup2(before, 2)
            os.close(before)
        log.seek(0)
        return log.read().decode()


def test_the_search_of_the_first_step_gives_no_advice():
    for written in run_on_ranks(warnings_of_torch, 2):
        assert "find_unused_parameters=True was specified" not in written


@raises_on_ranks(ConfigError, "does not run on CPUs. Leave the option out", 2)
def test_sync_batchnorm_on_a_cpu_raises():
    boost(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), sync_batchnorm=True)


class BatchNormAct(nn.BatchNorm1d):
    """BatchNorm that applies an activation, as timm's ``BatchNormAct2d``."""

    def forward(self, x):
        return super().forward(x).relu()


def test_sync_batchnorm_refuses_what_torch_would_not_replace():
    device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"drop the forward of 1 .*'1' \(BatchNormAct\)"):
        check_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), BatchNormAct(8)), device)
    with pytest.raises(ConfigError, match="the model is a `BatchNorm1d` itself"):
        check_sync_batchnorm(nn.BatchNorm1d(8), device)
    check_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8), nn.SyncBatchNorm(8)), device)


def keeps_buffers_apart(by_hand, **options):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_buffer("scale", torch.rand(8))
    if by_hand:
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        _, wrapped, optimizer = boost(model, broadcast_buffers=False, **options)
    for step in range(3):
        wrapped(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("asked", [None, False])
def test_broadcast_buffers_false_keeps_buffers_rank_local(asked):
    expected = run_on_ranks(keeps_buffers_apart, 2, by_hand=True)
    assert not torch.equal(expected[0]["scale"], expected[1]["scale"])
    found = run_on_ranks(keeps_buffers_apart, 2, by_hand=False, find_unused_parameters=asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_tensors(ours, theirs, tolerance_for(torch.float32))


@pytest.mark.parametrize("compiled", [False, True])
@raises_on_ranks(ConfigError, "ignore 1 of its parameters.*'first.weight'.*delete the attribute", 2)
def test_a_model_that_keeps_parameters_out_of_ddp_is_refused(compiled):
    model = TinyMLP()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
    boost(torch.compile(model, backend="eager") if compiled else model)


def evaluated_on_rank_0(alone):
    """Train a model with running statistics, and evaluate between steps; return the last loss and the statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("scale", torch.ones(1), persistent=False)
    _, model, optimizer = boost(model)
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 or not alone:
            with torch.no_grad():
                model.eval()(batch(step))
            model.train()
    return float(loss.detach()), model.unwrap()[1].running_mean.tolist()


def by_torch_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("scale", torch.ones(1), persistent=False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = wrapped(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        wrapped.eval()(batch(3))  # which broadcasts buffers once more
    return float(loss.detach()), model[1].running_mean.tolist()


def test_a_rank_may_evaluate_alone_and_statistics_are_those_of_rank_0():
    found = run_on_ranks(evaluated_on_rank_0, 2, True)
    assert found[0][1] == found[1][1]
    assert found == run_on_ranks(evaluated_on_rank_0, 2, False) == run_on_ranks(by_torch_alone, 2)


def missing_rank():
    booster, model, optimizer = boost(TinyMLP(), find_unused_parameters=False)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            return
        booster.backward(model(batch(step)).mean(), optimizer)
        optimizer.step()


def test_rank_that_does_not_call_backward_is_named():
    with pytest.raises(RankError) as caught:
        run_on_ranks(missing_rank, 2, group_timeout_seconds=3)
    assert isinstance(caught.value.__cause__, MissingRanksError)
    assert "`backward` #3 timed out" in str(caught.value.__cause__)


FROZEN_APART = """
import sys
import torch
from booster_core import Booster, launch
c = launch(int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2]), verbose=False)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer, *_ = Booster("cpu", plugin="ddp").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    if step == 2 and c.rank == 1:
        model.unwrap()[0].requires_grad_(False)
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + c.rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_ranks_that_freeze_other_parameters_end_long_before_the_time_limit(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FROZEN_APART)
    port = free_port()
    done = scripts.run(path, [(0, port), (1, port)])
    assert done.codes == [1, 1], done.output
    assert "rank 1 waits in `forward with other trained parameters than before` #1" in done.output
    assert "rank 0 waits in `" in done.output
