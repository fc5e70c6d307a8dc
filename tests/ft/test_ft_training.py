"""Training in replica groups: averages, commits, what is refused. What follows a death is in `test_ft_kills`."""

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from ranked import raises_on_ranks
from replica_ranks import BATCH, Net, assert_same_bits, batch_of, hear, loss_of, on_groups, say, state_of
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_ft import FaultTolerantPlugin
from booster_ft.groups import ReplicaGroups

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


@pytest.mark.parametrize(("ranks", "accumulate", "clip"), [(1, 1, None), (1, 2, 0.3), (2, 2, 0.3)])
@on_groups(GROUPS, "ranks")
def test_gradients_are_those_of_one_process_with_all_samples(group, tmp_path, ranks, accumulate, clip):
    everyone = range(GROUPS * ranks)
    expected, parameters = _one_process(
        3, lambda step: [_number(i, step, micro) for i in everyone for micro in range(accumulate)], clip
    )
    booster, model, optimizer = _boosted(group, tmp_path)
    norms = []
    for step in range(3):
        for micro in range(accumulate):
            is_last = micro + 1 == accumulate
            with contextlib.nullcontext() if is_last else booster.no_sync(model):
                booster.backward(loss_of(model, batch_of(_number(group.index, step, micro))) / accumulate, optimizer)
        if clip is not None:
            norms.append(float(optimizer.clip_grad_by_norm(clip)))
        for name, values in expected[step].items():
            torch.testing.assert_close(booster.plugin.full_gradient(model, name), values, rtol=1e-12, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()
    groups, state = booster.plugin.groups, state_of(booster, model)
    assert (groups.step, groups.num_commits, groups.num_participants) == (3, 3, GROUPS)
    for name, values in parameters.items():
        torch.testing.assert_close(state[f"{name}:None"], values.detach(), rtol=1e-9, atol=1e-12)
    for other, other_norms in group.gather(tmp_path, (state, norms)):
        assert_same_bits(state, other)
        assert norms == other_norms


@on_groups(GROUPS)
def test_an_overflow_in_one_group_skips_the_step_in_all(group, tmp_path):
    booster, model, optimizer = _boosted(group, tmp_path, torch.optim.SGD, Net(torch.float32), precision=FP16)
    for step, expected in enumerate([(False, 64.0), (True, 32.0), (False, 32.0)]):
        x = batch_of(group.index + 10 * step, torch.float32)
        if (group.replica_id, step) == (1, 1):
            x[0, 0] = float("inf")
        booster.backward(loss_of(model, x), optimizer)
        optimizer.step()
        assert (optimizer.found_overflow, optimizer.loss_scaler.scale) == expected
        optimizer.zero_grad()
    assert_same_bits(*group.gather(tmp_path, state_of(booster, model)))


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
@on_groups(GROUPS)
def test_what_would_part_the_groups_raises_in_all(group, tmp_path, how, error, message):
    booster = group.booster(inner="single" if how == "layers" else "ddp")
    net = Net()
    if how == "values" and group.replica_id:
        nn.init.ones_(net.last.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2 if how == "options" and group.replica_id else 0.1)
    with pytest.raises(error, match=f"(?s){message}"):  # noqa: PT012 - in which step depends on how
        model, optimizer, *_ = booster.boost(net, optimizer)
        group.meet(booster, tmp_path)
        for step in range(3):
            net.skips = how == "layers" and step == 2 and group.replica_id == 1
            if how == "rates" and step == 1 and group.replica_id:
                optimizer.param_groups[0]["lr"] = 0.3
            booster.backward(loss_of(model, batch_of(group.index)), optimizer)
            optimizer.step(loss_of if how == "closure" else None)
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", [None, FP16], ids=["fp64", "fp16"])
@on_groups(GROUPS, min_replicas=1)
def test_a_group_that_comes_later_catches_up(group, tmp_path, precision):
    """Group 1 comes when group 0 has trained for some steps; both go on together."""
    join = ReplicaGroups._connect

    def joined(self):
        manager = join(self)
        say(tmp_path, "coming" if group.replica_id else "there")
        return manager

    dtype = torch.float32 if precision else torch.float64
    if group.replica_id:
        hear(tmp_path, "trained")
    booster = group.booster(precision=precision)
    model = Net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    data = torch.utils.data.TensorDataset(x, torch.arange(96))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    seen, randoms = [], []
    with mock.patch.object(ReplicaGroups, "_connect", joined):
        model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
        for x, index in loader:
            if booster.plugin.groups.num_commits == 3 and group.replica_id == 0 and not seen[3:]:
                say(tmp_path, "trained")
                hear(tmp_path, "coming")
            if group.replica_id and not seen:
                assert len(state_of(booster, model)) > 8, "the optimizer had no state"
            seen.append(index.tolist())
            randoms.append(float(torch.rand(())))
            _step(booster, model, optimizer, x)
            scheduler.step()
            if booster.plugin.step == 7:
                break
    commits = booster.plugin.groups.num_commits
    assert 1 <= commits <= 4 if group.replica_id else commits == 7, "which step it comes to is chance"
    scale = optimizer.loss_scaler.scale if optimizer.loss_scaler else None
    settings = optimizer.param_groups[0]["lr"], scale
    ours, theirs = group.gather(tmp_path, (state_of(booster, model), settings, seen, randoms))
    assert_same_bits(theirs[0], ours[0])
    assert theirs[1] == ours[1], "learning rate and loss scale"
    taken = [set(index) for index in ours[2] + theirs[2]]
    assert len(set().union(*taken)) == sum(map(len, taken)), "no sample was seen twice"
    assert not set(ours[3]) & set(theirs[3]), "groups draw other random numbers"


@on_groups(GROUPS)
def test_spares_keep_the_global_batch(group, tmp_path):
    booster, model, optimizer = _boosted(group, tmp_path, min_replicas=1, spares=True)
    for step in range(3):
        _step(booster, model, optimizer, batch_of(_number(group.index, step, 0)))
    state, is_first = state_of(booster, model), booster.plugin.groups.join().participating_rank() == 0
    found = group.gather(tmp_path, (state, is_first))
    first = [is_first for _, is_first in found].index(True)
    _, parameters = _one_process(3, lambda step: [_number(first, step, 0)])
    assert_same_bits(state, found[0][0])
    for name, values in parameters.items():
        torch.testing.assert_close(state[f"{name}:None"], values.detach(), rtol=1e-12, atol=1e-14)


@on_groups(GROUPS)
def test_checkpoints_load_in_the_groups_and_under_another_plugin(group, tmp_path):
    booster, model, optimizer = _boosted(group, tmp_path)
    for step in range(2):
        _step(booster, model, optimizer, batch_of(_number(group.index, step, 0)))
    booster.save_checkpoint(tmp_path / f"group{group.replica_id}", model=model, optimizer=optimizer, step=2)
    saved = state_of(booster, model)
    _step(booster, model, optimizer, batch_of(5))
    booster.load_checkpoint(tmp_path / f"group{group.replica_id}", model=model, optimizer=optimizer)
    assert_same_bits(state_of(booster, model), saved)
    _step(booster, model, optimizer, batch_of(5))
    assert booster.plugin.step == 1, "counted since the values were loaded"
    assert_same_bits(*group.gather(tmp_path, state_of(booster, model)))
    booster, model = Booster(), Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    booster.load_checkpoint(tmp_path / "group1", model=model, optimizer=optimizer)
    assert_same_bits(state_of(booster, model), saved)


@pytest.mark.parametrize("outer", [None, "diloco"])
@on_groups(GROUPS)
def test_parameters_are_synchronized_now_and_then(group, tmp_path, outer):
    make = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    settings = {"sync_every": 2, "outer_optimizer": None if outer is None else make}
    booster, boosted, own_optimizer = _boosted(group, tmp_path, torch.optim.SGD, **settings)
    replicas = [Net() for _ in range(GROUPS)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in replicas]
    shared = Net()
    outer_optimizer = make(shared.parameters())
    for step in range(4):
        _step(booster, boosted, own_optimizer, batch_of(_number(group.index, step, 0)))
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
        found = dict(booster.unwrap(boosted).named_parameters())
        for name, values in replicas[group.index].named_parameters():
            torch.testing.assert_close(found[name], values, rtol=1e-10, atol=1e-12)
    assert booster.plugin.step == 2
    assert_same_bits(*group.gather(tmp_path, {name: each.detach() for name, each in found.items()}))


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
@on_groups(GROUPS)
def test_boost_refuses_what_groups_cannot_train(group, what, message):
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
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        booster.boost(model, optimizers or torch.optim.SGD(model.parameters(), lr=0.1), None, loader)


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
