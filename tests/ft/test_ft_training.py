"""Training in replica groups: averages, commits, what is refused. What follows a death is in `test_ft_kills`."""

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from ranked import raises_on_ranks
from replica_ranks import BATCH, Net, assert_same_bits, batch_of, hear, loss_of, run_groups, say, state_of
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_ft import FaultTolerantPlugin
from booster_ft.groups import ReplicaGroups
from booster_testing.ranks import RankError, run_on_ranks

GROUPS = 2
FP16 = replace(PrecisionPolicy.parse("fp16"), loss_scale=LossScaleConfig(initial_scale=64.0))


def _one_process(steps, numbers_of, clip=None):
    """Train as one process does on all samples; return the gradients of each step and the final parameters."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = []
    for step in range(steps):
        loss_of(model, torch.cat([batch_of(number) for number in numbers_of(step)])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, dict(model.named_parameters())


def _number(index, step, micro):
    return 100 * step + 10 * micro + index


def _boosted(group, folder, make=torch.optim.AdamW, model=None, **options):
    """Return a Booster, a model and its optimizer when all groups have met."""
    booster, model = group.booster(**options), model or Net()
    model, optimizer, *_ = booster.boost(model, make(model.parameters(), lr=0.01))
    group.meet(booster, folder)
    return booster, model, optimizer


def _step(booster, model, optimizer, x):
    booster.backward(loss_of(model, x), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _train(group, folder, steps, accumulate, clip):
    booster, model, optimizer = _boosted(group, folder)
    gradients, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            is_last = micro + 1 == accumulate
            with contextlib.nullcontext() if is_last else booster.no_sync(model):
                booster.backward(loss_of(model, batch_of(_number(group.index, step, micro))) / accumulate, optimizer)
        if clip is not None:
            norms.append(float(optimizer.clip_grad_by_norm(clip)))
        gradients.append({name: booster.plugin.full_gradient(model, name) for name in dict(Net().named_parameters())})
        optimizer.step()
        optimizer.zero_grad()
    groups = booster.plugin.groups
    assert (groups.step, groups.num_commits, groups.num_participants) == (steps, steps, group.num_groups)
    return gradients, state_of(booster, model), norms


@pytest.mark.parametrize(("ranks", "accumulate", "clip"), [(1, 1, None), (1, 2, 0.3), (2, 2, 0.3)])
def test_gradients_are_those_of_one_process_with_all_samples(tmp_path, ranks, accumulate, clip):
    found = run_groups(_train, GROUPS, ranks, tmp_path, 3, accumulate, clip)
    everyone = range(GROUPS * ranks)
    expected, parameters = _one_process(
        3, lambda step: [_number(i, step, micro) for i in everyone for micro in range(accumulate)], clip
    )
    for gradients, state, _ in found:
        for ours, theirs in zip(gradients, expected, strict=True):
            for name, values in theirs.items():
                torch.testing.assert_close(ours[name], values, rtol=1e-12, atol=1e-14)
        for name, values in parameters.items():
            torch.testing.assert_close(state[f"{name}:None"], values.detach(), rtol=1e-9, atol=1e-12)
    for _, state, norms in found:
        assert_same_bits(state, found[0][1])
        assert norms == found[0][2]


def _overflow(group, folder):
    booster, model, optimizer = _boosted(group, folder, torch.optim.SGD, Net(torch.float32), precision=FP16)
    seen = []
    for step in range(3):
        x = batch_of(group.index + 10 * step, torch.float32)
        if (group.replica_id, step) == (1, 1):
            x[0, 0] = float("inf")
        booster.backward(loss_of(model, x), optimizer)
        optimizer.step()
        seen.append((optimizer.found_overflow, optimizer.loss_scaler.scale))
        optimizer.zero_grad()
    return seen, state_of(booster, model)


def test_an_overflow_in_one_group_skips_the_step_in_all(tmp_path):
    (ours, state), (theirs, other) = run_groups(_overflow, GROUPS, 1, tmp_path)
    assert ours == theirs == [(False, 64.0), (True, 32.0), (False, 32.0)]
    assert_same_bits(state, other)


def _differ(group, folder, how):
    booster = group.booster(inner="single" if how == "layers" else "ddp")
    model = Net()
    if how == "values" and group.replica_id:
        nn.init.ones_(model.last.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if how == "options" and group.replica_id else 0.1)
    net = model
    model, optimizer, *_ = booster.boost(model, optimizer)
    group.meet(booster, folder)
    for step in range(3):
        net.skips = how == "layers" and step == 2 and group.replica_id == 1
        if how == "rates" and step == 1 and group.replica_id:
            optimizer.param_groups[0]["lr"] = 0.3
        booster.backward(loss_of(model, batch_of(group.index)), optimizer)
        optimizer.step(loss_of if how == "closure" else None)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("values", ConfigError, "groups start with different values.*Seed all groups alike"),
        ("options", ConfigError, "groups start with different values"),
        ("layers", GradientError, "gradients of different parameters.*add `0.0"),
        ("rates", GradientError, "different learning rates.*Step schedulers alike"),
        ("closure", GradientError, "closure.*replica groups"),
    ],
)
def test_what_would_part_the_groups_raises_in_all(tmp_path, how, error, message):
    with pytest.raises(RankError, match=f"(?s)on ranks (0, 1|1, 0).*{message}") as caught:
        run_groups(_differ, GROUPS, 1, tmp_path, how)
    assert [type(each) for each in caught.value.exceptions.values()] == [error] * 2


def _come_back(group, folder, precision):
    """Group 1 comes when group 0 has trained for some steps; both go on together."""
    dtype = torch.float32 if precision else torch.float64
    if group.replica_id:
        hear(folder, "trained")
    booster = group.booster(precision=precision)
    model = Net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    data = torch.utils.data.TensorDataset(x, torch.arange(96))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    seen, randoms, before = [], [], {}
    for x, index in loader:
        if booster.plugin.groups.num_commits == 3 and group.replica_id == 0 and not seen[3:]:
            say(folder, "trained")
            hear(folder, "coming")
        if group.replica_id and not seen:
            before = state_of(booster, model)
        seen.append(index.tolist())
        randoms.append(float(torch.rand(())))
        _step(booster, model, optimizer, x)
        scheduler.step()
        if booster.plugin.step == 7:
            break
    scale = optimizer.loss_scaler.scale if optimizer.loss_scaler else None
    rates = optimizer.param_groups[0]["lr"], scale
    return seen, randoms, rates, booster.plugin.groups.num_commits, state_of(booster, model), len(before)


def _announce(group, folder, precision):
    join = ReplicaGroups._connect

    def joined(self):
        manager = join(self)
        say(folder, "coming" if group.replica_id else "there")
        return manager

    with mock.patch.object(ReplicaGroups, "_connect", joined):
        return _come_back(group, folder, precision)


@pytest.mark.parametrize("precision", [None, FP16], ids=["fp64", "fp16"])
def test_a_group_that_comes_later_catches_up(tmp_path, precision):
    ours, theirs = run_groups(_announce, GROUPS, 1, tmp_path, precision, min_replicas=1)
    assert ours[3] == 7
    assert 1 <= theirs[3] <= 4, "which step it comes to is chance"
    assert_same_bits(theirs[4], ours[4])
    assert theirs[2] == ours[2], "learning rate and loss scale"
    assert theirs[5] > 8, "the optimizer had no state"
    taken = [set(index) for index in ours[0] + theirs[0]]
    assert len(set().union(*taken)) == sum(map(len, taken)), "no sample was seen twice"
    assert not set(ours[1]) & set(theirs[1]), "groups draw other random numbers"


def _spare(group, folder):
    booster, model, optimizer = _boosted(group, folder, min_replicas=1, spares=True)
    for step in range(3):
        _step(booster, model, optimizer, batch_of(_number(group.index, step, 0)))
    return state_of(booster, model), booster.plugin.groups.join().participating_rank() == 0


def test_spares_keep_the_global_batch(tmp_path):
    found = run_groups(_spare, GROUPS, 1, tmp_path)
    first = [is_first for _, is_first in found].index(True)
    _, parameters = _one_process(3, lambda step: [_number(first, step, 0)])
    for state, _ in found:
        assert_same_bits(state, found[0][0])
        for name, values in parameters.items():
            torch.testing.assert_close(state[f"{name}:None"], values.detach(), rtol=1e-12, atol=1e-14)


def _save(group, folder):
    booster, model, optimizer = _boosted(group, folder)
    for step in range(2):
        _step(booster, model, optimizer, batch_of(_number(group.index, step, 0)))
    booster.save_checkpoint(folder / f"group{group.replica_id}", model=model, optimizer=optimizer, step=2)
    saved = state_of(booster, model)
    _step(booster, model, optimizer, batch_of(5))
    booster.load_checkpoint(folder / f"group{group.replica_id}", model=model, optimizer=optimizer)
    assert_same_bits(state_of(booster, model), saved)
    _step(booster, model, optimizer, batch_of(5))
    return saved, state_of(booster, model), booster.plugin.step


def _load(folder):
    booster = Booster()
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    booster.load_checkpoint(folder / "group1", model=model, optimizer=optimizer)
    return state_of(booster, model)


def test_checkpoints_load_in_the_groups_and_under_another_plugin(tmp_path):
    (saved, after, step), (_, other, _) = run_groups(_save, GROUPS, 1, tmp_path)
    assert step == 1, "counted since the values were loaded"
    assert_same_bits(after, other)
    (loaded,) = run_on_ranks(_load, 1, tmp_path)
    assert_same_bits(loaded, saved)


def _local(group, folder, outer):
    make = None if outer is None else partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    booster, model, optimizer = _boosted(group, folder, torch.optim.SGD, sync_every=2, outer_optimizer=make)
    states = []
    for step in range(4):
        _step(booster, model, optimizer, batch_of(_number(group.index, step, 0)))
        states.append({name: p.detach().clone() for name, p in booster.unwrap(model).named_parameters()})
    return states, booster.plugin.step


@pytest.mark.parametrize("outer", [None, "diloco"])
def test_parameters_are_synchronized_now_and_then(tmp_path, outer):
    found = run_groups(_local, GROUPS, 1, tmp_path, outer)
    replicas = [Net() for _ in range(GROUPS)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in replicas]
    shared = Net()
    outer_optimizer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        for index, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch_of(_number(index, step, 0))).backward()
            optimizer.step()
        if step % 2:
            for target, *others in zip(shared.parameters(), *(each.parameters() for each in replicas), strict=True):
                mean = torch.stack([each.detach() for each in others]).mean(dim=0)
                target.grad = target.detach() - mean
                if outer is None:
                    target.data.copy_(mean)
            if outer is not None:
                outer_optimizer.step()
            for model in replicas:
                model.load_state_dict(shared.state_dict())
        for index, (states, _) in enumerate(found):
            for name, values in replicas[index].named_parameters():
                torch.testing.assert_close(states[step][name], values.detach(), rtol=1e-10, atol=1e-12)
    assert [steps for _, steps in found] == [2, 2]
    assert_same_bits(found[0][0][-1], found[1][0][-1])


def _refused(group, what):
    booster = group.booster()
    model, loader, optimizers = Net(), None, None
    if what == "sparse":
        model = nn.EmbeddingBag(8, 4, sparse=True)
    elif what == "complex":
        model = nn.Linear(4, 4, dtype=torch.complex64)
    elif what == "sampler":
        data = torch.utils.data.TensorDataset(torch.zeros(16, 8))
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
        loader = torch.utils.data.DataLoader(data, sampler=sampler)
    elif what == "several":
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    elif what == "second":
        first = Net()
        booster.boost(first, torch.optim.SGD(first.parameters(), lr=0.1))
    booster.boost(model, optimizers or torch.optim.SGD(model.parameters(), lr=0.1), None, loader)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "gradients of '' are sparse.*`sparse=False`"),
        ("complex", "'weight' is complex"),
        ("sampler", "`num_replicas=1`, but of the ranks that see different samples this is rank"),
        ("several", "by one optimizer"),
        ("second", "one model in a run"),
    ],
)
def test_boost_refuses_what_groups_cannot_train(what, message):
    with pytest.raises(RankError, match=f"(?s){message}") as caught:
        run_groups(_refused, GROUPS, 1, what)
    assert [type(each) for each in caught.value.exceptions.values()] == [ConfigError] * 2


@raises_on_ranks(ConfigError, "Another model was boosted in this process since", 1)
def test_a_training_that_another_has_replaced_says_so():
    trained = []
    for _ in range(2):
        booster = Booster(plugin=FaultTolerantPlugin(inner="single"))
        model = Net()
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        trained.append((booster, model, optimizer))
        _step(booster, model, optimizer, batch_of(0))
    loss_of(trained[0][1], batch_of(0))
