"""Objects with `state_dict` and `load_state_dict` that a user registers, and data loaders that are not ours."""

import json

import pytest
import torch
from file_faults import change_manifest
from reference_plugins import ReferencePlugin
from torch import nn

from booster_checkpoint.run.manifest import verify_folder
from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks


class Keeper:
    """Keeps a state, and hands it out."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


STATE = {"best": 0.25, "seen": [1, 2, (3, None)], "mean": torch.arange(6.0).view(2, 3), 7: torch.tensor(True)}


def make(**registered):
    plugin = ReferencePlugin() if DistCoordinator().world_size > 1 else None
    booster, model = Booster("cpu", None, plugin), nn.Linear(2, 2)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name, item in registered.items():
        booster.register_for_checkpointing(item, name=name)
    return booster, model


def equal(a, b):
    if isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], value) for key, value in b.items())
    return a == b


@pytest.mark.parametrize("use_async", [False, True])
def test_states_come_back_exactly(use_async, tmp_path):
    counter = nn.BatchNorm1d(3)  # a module has both methods, too
    counter(torch.randn(4, 3))
    booster, model = make(keeper=Keeper(STATE), counter=counter)
    saved = {name: tensor.clone() for name, tensor in counter.state_dict().items()}
    booster.save_checkpoint(tmp_path, step=1, model=model, use_async=use_async)
    counter(torch.randn(4, 3))  # while it is written
    booster.wait()
    verify_folder(tmp_path / "step-00000001")
    keeper, other = Keeper(), nn.BatchNorm1d(3)
    booster, model = make(keeper=keeper, counter=other)
    booster.load_checkpoint(tmp_path, model=model)
    assert equal(keeper.state, STATE)
    assert equal(dict(other.state_dict()), saved)


def test_objects_without_a_name_are_numbered(tmp_path):
    booster, model = make()
    booster.register_for_checkpointing(Keeper(1), Keeper("b"))
    booster.register_for_checkpointing(Keeper([3]))
    booster.save_checkpoint(tmp_path, step=1, model=model)
    found = [Keeper(), Keeper(), Keeper()]
    booster, model = make()
    booster.register_for_checkpointing(*found)
    booster.load_checkpoint(tmp_path, model=model)
    assert [keeper.state for keeper in found] == [1, "b", [3]]


def test_nothing_is_pickled(tmp_path):
    class Own:
        pass

    booster, model = make(keeper=Keeper({"a": [Own()]}))
    with pytest.raises(CheckpointError, match=r"'registered/keeper/a/0' is a .*Own, which cannot be saved"):
        booster.save_checkpoint(tmp_path, step=1, model=model)


def test_what_cannot_be_registered():
    booster, _ = make(taken=Keeper())
    with pytest.raises(TypeError, match="`dict` has no `state_dict` and `load_state_dict`"):
        booster.register_for_checkpointing({})
    for name, objects in (("taken", 1), ("", 1), ("a/b", 1), ("two", 2)):
        with pytest.raises(ConfigError, match="`name="):
            booster.register_for_checkpointing(*(Keeper() for _ in range(objects)), name=name)


def save_by_rank(root, per_rank, key):
    rank = DistCoordinator().rank
    booster, model = make()
    state = {"all": {"n": 1, "t": torch.ones(2)}, "number": {"n": rank}, "tensor": {"t": torch.full((2,), float(rank))}}
    booster.register_for_checkpointing(Keeper(state[key]), name="keeper", per_rank=per_rank)
    booster.save_checkpoint(root, step=1, model=model)


def load_by_rank(root, per_rank, strict=True):
    booster, model = make()
    keeper = Keeper()
    booster.register_for_checkpointing(keeper, name="keeper", per_rank=per_rank)
    booster.load_checkpoint(root, model=model, strict=strict)
    return keeper.state


@pytest.mark.parametrize("key", ["number", "tensor"])
def test_a_shared_state_that_differs_is_refused(key, tmp_path):
    match = "'keeper' has another state on rank 1 than on rank 0. .*per_rank=True"
    expect_on_ranks(CheckpointError, match, save_by_rank, 2, str(tmp_path), False, key)


def test_each_rank_gets_its_own_state_back(tmp_path):
    run_on_ranks(save_by_rank, 2, str(tmp_path), True, "tensor")
    first, second = run_on_ranks(load_by_rank, 2, str(tmp_path), True)
    assert (first["t"].tolist(), second["t"].tolist()) == ([0.0, 0.0], [1.0, 1.0])
    match = "'keeper' has a state of each of 2 ranks, and 1 load it"
    expect_on_ranks(CheckpointError, match, load_by_rank, 1, str(tmp_path), True)
    assert run_on_ranks(load_by_rank, 1, str(tmp_path), True, False) == [None]


def test_a_shared_state_comes_back_on_any_number_of_ranks(tmp_path):
    run_on_ranks(save_by_rank, 2, str(tmp_path), False, "all")
    (found,) = run_on_ranks(load_by_rank, 1, str(tmp_path), False)
    assert found["n"] == 1
    match = "saved with `per_rank=False`, and is registered with True"
    expect_on_ranks(CheckpointError, match, load_by_rank, 1, str(tmp_path), True)


def test_other_objects_than_those_saved_are_refused(tmp_path):
    booster, model = make(old=Keeper(1), both=Keeper(2))
    booster.save_checkpoint(tmp_path, step=1, model=model)
    booster, model = make(new=Keeper(), both=(both := Keeper()))
    with pytest.raises(CheckpointError, match=r"without 'new'.* It holds 'old', which nobody registered here"):
        booster.load_checkpoint(tmp_path, model=model)
    booster.load_checkpoint(tmp_path, model=model, strict=False)
    assert both.state == 2
    booster, model = make()
    booster.load_checkpoint(tmp_path, model=model)  # none: to evaluate, say


@pytest.mark.parametrize("registered", [3, {"a": 3}, {"keeper": {}}, {"keeper": {"states": []}}])
def test_damaged_states(registered, tmp_path):
    booster, model = make(keeper=Keeper(1))
    booster.save_checkpoint(tmp_path, step=1, model=model)
    path = tmp_path / "step-00000001" / "training_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "registered": registered}))
    change_manifest(path.parent, lambda it: it["files"]["training_state.json"].update(nbytes=path.stat().st_size))
    with pytest.raises(CheckpointError, match="is damaged"):
        booster.load_checkpoint(tmp_path, model=model, verify=False)


def train_with_torchdata(root, stop, resume, workers):
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    c = DistCoordinator()
    booster, model = make()
    sampler = DistributedSampler(range(48), c.world_size, c.rank, shuffle=True, seed=3)
    loader = StatefulDataLoader(
        list(range(48)), batch_size=2, sampler=sampler, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip
    _, _, _, kept, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
    assert kept is loader
    seen = []
    if resume:
        booster.load_checkpoint(root, model=model, dataloader=loader)
    for step, batch in enumerate(loader, start=1):
        seen += batch.tolist()
        if step == stop:
            booster.save_checkpoint(root, step=step, model=model, dataloader=loader)
            break
    return seen


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # which torchdata calls
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchdatas_loader_goes_on_where_it_was(workers, tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    whole = run_on_ranks(train_with_torchdata, 2, str(tmp_path), None, False, workers)
    first = run_on_ranks(train_with_torchdata, 2, str(tmp_path), 5, False, workers)
    rest = run_on_ranks(train_with_torchdata, 2, str(tmp_path), None, True, workers)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    match = "The data loader has a state of each of 2 ranks, and 3 load it"
    expect_on_ranks(CheckpointError, match, train_with_torchdata, 3, str(tmp_path), None, True, workers)


class CountingLoader(torch.utils.data.DataLoader):
    """A loader with a position of its own."""

    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def save_own_loader(root, position):
    booster, model = make()
    loader = CountingLoader([1, 2, 3])
    loader.position = position or 10 + DistCoordinator().rank
    booster.save_checkpoint(root, step=1, model=model, dataloader=loader)


def load_own_loader(root):
    booster, model = make()
    loader = CountingLoader([1, 2, 3])
    booster.load_checkpoint(root, model=model, dataloader=loader)
    return loader.position


def load_our_loader(root):
    booster, model = make()
    booster.load_checkpoint(root, model=model, dataloader=booster.prepare_dataloader([1, 2, 3]))


def test_a_loader_of_another_class_gets_its_ranks_position_back(tmp_path):
    run_on_ranks(save_own_loader, 2, str(tmp_path), None)
    assert run_on_ranks(load_own_loader, 2, str(tmp_path)) == [10, 11]
    expect_on_ranks(CheckpointError, "of another class than Booster's", load_our_loader, 2, str(tmp_path))
    run_on_ranks(save_own_loader, 2, str(tmp_path / "alike"), 10)  # each has read ten samples: together twenty
    match = "The data loader has a state of each of 2 ranks, and 1 load it"
    for root in (tmp_path, tmp_path / "alike"):
        expect_on_ranks(CheckpointError, match, load_own_loader, 1, str(root))
