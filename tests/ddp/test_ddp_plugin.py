"""The DDP plugin: options, compression hooks, unused parameters, buffers, and sparse gradients."""

import contextlib
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise, own_loss, train_boosted, train_plainly
from driven_runs import same_loop
from free_ports import free_port
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster, PrecisionPolicy
from booster_core.errors import ConfigError, GradientError, MissingRanksError
from booster_ddp import TorchDDPPlugin
from booster_ddp.plugin import check_sync_batchnorm
from booster_runtime import collectives
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import EXACT, Tolerance, assert_same_tensors
from booster_testing.models import TinyMLP


def boost(model, lr=0.1, precision=None, **options):
    booster = Booster("cpu", precision, TorchDDPPlugin(**options))
    trained = [p for p in model.parameters() if p.requires_grad]
    boosted = booster.boost(model, torch.optim.SGD(trained, lr=lr) if trained else None)
    return booster, boosted.model, boosted.optimizer


ROWS = noise(4, 8)
CASE = Case(build=TinyMLP, batch=ROWS, steps=4, max_norm=None)


def batch(step):
    """Return this rank's samples."""
    return ROWS(step, dist.get_rank())


def train(model, optimizer, steps=3):
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


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


@on_ranks(2)
def test_powersgd_gives_every_rank_the_same_gradients():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    state = PowerSGDState(process_group=None, start_powerSGD_iter=2, matrix_approximation_rank=2)
    setting = Setting(TorchDDPPlugin, {"comm_hook": "powersgd", "comm_hook_state": state})
    found = train_boosted(replace(CASE, steps=6), setting).trained.gradients
    assert state.iter >= 4
    for ours, theirs in zip(*collectives.all_gather_object(found), strict=True):
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


@on_ranks(2)
def test_the_first_step_averages_at_the_end_of_backward_and_decides_that_nothing_is_searched():
    torch.manual_seed(0)
    booster, model, optimizer = boost(TinyMLP())
    first = model.ddp
    for step in range(3):
        loss = model(batch(step)).mean()
        assert model.ddp is first
        assert not model.ddp.find_unused_parameters
        assert model.ddp.require_backward_grad_sync == (step > 0)
        booster.backward(loss, optimizer)
        gathered = collectives.all_gather_object({name: p.grad for name, p in model.named_parameters()})
        for other in gathered:
            assert_same_tensors(other, gathered[0], EXACT)
        optimizer.step()
        optimizer.zero_grad()


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


def test_sync_batchnorm_refuses_what_torch_would_not_replace():
    class BatchNormAct(nn.BatchNorm1d):
        """BatchNorm that applies an activation, as timm's ``BatchNormAct2d``."""

        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(ConfigError, match=r"drop the forward of 1 .*'1' \(BatchNormAct\)"):
        check_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), BatchNormAct(8)))
    with pytest.raises(ConfigError, match="the model is a `BatchNorm1d` itself"):
        check_sync_batchnorm(nn.BatchNorm1d(8))
    check_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8), nn.SyncBatchNorm(8)))


@pytest.mark.parametrize("search", [None, False])
@on_ranks(2)
def test_broadcast_buffers_false_keeps_buffers_rank_local(search):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.register_buffer("scale", torch.rand(8))
    scale, alone = model.scale.clone(), nn.BatchNorm1d(8)
    _, boosted, optimizer = boost(model, broadcast_buffers=False, find_unused_parameters=search)
    train(boosted, optimizer)
    for step in range(3):
        alone(batch(step))
    assert torch.equal(model.scale, scale)
    torch.testing.assert_close(model[0].running_mean, alone.running_mean)


@on_ranks(2)
def test_each_rank_keeps_what_the_model_asks_ddp_to_ignore():
    torch.manual_seed(dist.get_rank())
    model = TinyMLP()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
    _, model, optimizer = boost(model)
    train(model, optimizer)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    first, second = collectives.all_gather_object(parameters)
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["first.weight"]


@on_ranks(2)
def test_a_rank_may_evaluate_alone_and_statistics_are_those_of_rank_0():
    def evaluated(how):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        module.register_buffer("scale", torch.ones(1), persistent=False)
        if how == "by torch alone":
            model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1)
        else:
            _, model, optimizer = boost(module)
        for step in range(3):
            train(model, optimizer, 1)
            if how == "on all ranks" or (how == "on rank 0" and dist.get_rank() == 0):
                with torch.no_grad():
                    model.eval()(batch(step))
                model.train()
        with torch.no_grad():
            loss = model.eval()(batch(3)).square().mean()  # before which torch broadcasts buffers once more
        return float(loss), module[1].running_mean.tolist()

    found = evaluated("on rank 0")
    first, second = collectives.all_gather_object(found)
    assert first[1] == second[1]
    assert found == evaluated("on all ranks") == evaluated("by torch alone")


@on_ranks(2, group_timeout_seconds=3)
def test_rank_that_does_not_call_backward_is_named():
    booster, model, optimizer = boost(TinyMLP(), find_unused_parameters=False)
    for step in range(2):
        booster.backward(model(batch(step)).mean(), optimizer)
        optimizer.step()
    if dist.get_rank() == 0:
        with pytest.raises(MissingRanksError, match="`backward` #3 timed out"):
            booster.backward(model(batch(2)).mean(), optimizer)


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


@pytest.mark.parametrize(("search", "num_steps"), [(None, 2), (True, 2), (False, 0)])
@on_ranks(2)
def test_all_is_freed_with_the_last_reference(search, num_steps):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    booster, model, optimizer = boost(module, find_unused_parameters=search)
    train(model, optimizer, num_steps)
    kept = [module, *module.parameters(), model, model.ddp, model.gradients, optimizer, optimizer.unwrap()]
    held = [weakref.ref(each) for each in kept]
    gc.collect()
    gc.disable()  # `del` is enough
    try:
        del booster, model, module, optimizer, kept
        assert [type(ref()).__name__ for ref in held if ref() is not None] == []
    finally:
        gc.enable()


@same_loop(CASE, Setting(TorchDDPPlugin), own=True)
def test_gradients_are_averaged_where_only_the_optimizer_is_kept(run):
    """The script keeps its own model and the optimizer, and lets go of what `boost` returned for the model."""
    run.model = None
    for step in range(3):
        run.mean(step, lambda x, _: run.net.first(x).square().mean()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# ---- sparse gradients of embedding tables are averaged in every step, and stay sparse


class Table(nn.Module):
    """A table with sparse gradients that is used for some batches only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, tokens):
        return self.bias + (self.table(tokens).sum(1) if len(tokens[0]) else torch.zeros(len(tokens), 4))


def on_all(number, replica):
    return torch.randint(10, (3, 2), generator=torch.Generator().manual_seed(10 * number + replica))


def on_first(number, replica):
    return torch.empty(3, 0, dtype=torch.int64) if replica else on_all(number, replica)


def compare_with_one_process(batch, find_unused_parameters, *, under_no_sync):
    case = Case(build=Table, batch=batch, max_norm=None)
    expected = train_plainly(case, 2)
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=find_unused_parameters))
    model, plain_optimizer = case.make()
    boosted, optimizer, *_ = booster.boost(model, plain_optimizer)
    for step in range(case.steps):
        with booster.no_sync(boosted) if under_no_sync else contextlib.nullcontext():
            booster.backward(own_loss(boosted(batch(step, dist.get_rank())), None), optimizer)
        optimizer.settle()
        assert model.table.weight.grad.is_sparse
        ours = {name: p.grad.to_dense() for name, p in model.named_parameters()}
        theirs = {name: gradient.to_dense() for name, gradient in expected.gradients[step].items()}
        assert_same_tensors(ours, theirs, case.tolerance)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_tensors(model.state_dict(), expected.parameters, case.tolerance)


@pytest.mark.parametrize("find_unused_parameters", [None, False])
def test_sparse_gradients_equal_one_process(find_unused_parameters):
    run_on_ranks(compare_with_one_process, 2, on_all, find_unused_parameters, under_no_sync=False)


def test_sparse_gradient_of_one_rank_is_averaged_with_zeros_under_no_sync():
    run_on_ranks(compare_with_one_process, 2, on_first, None, under_no_sync=True)


def used_on_one_rank_outside_of_no_sync():
    model = Table()
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=True))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(own_loss(boosted(on_first(0, dist.get_rank())), None), optimizer)


def test_sparse_gradient_that_ddp_can_not_average_names_no_sync():
    with pytest.raises(RankError) as caught:
        run_on_ranks(used_on_one_rank_outside_of_no_sync, 2)
    assert isinstance(caught.value.__cause__, GradientError)
    assert "sparse gradients was not used on this rank" in str(caught.value.__cause__)
    assert "`booster.no_sync`" in str(caught.value.__cause__)
