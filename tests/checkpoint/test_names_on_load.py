"""Names that are changed or left out on load, and states that other programs nest or number."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_calls import EngineCalls
from reference_plugins import ReferencePlugin
from safetensors.torch import save_file
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import expect_on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # DCP's writer of torch 2.10 uses it
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch says so of `no_dist=True`
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def load(model, path, **options):
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    return EngineCalls().load_model(adapter, path, module=model, **options)


def same(a, b):
    return {name for name, tensor in a.state_dict().items() if torch.equal(tensor, b.state_dict()[name])}


def write(path, front="", **changes):
    tensors = {f"{front}{name}": tensor.clone() for name, tensor in make().state_dict().items()}
    tensors |= changes
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("front", "own", "rename"),
    [
        ("model.", "", {r"^model\.": ""}),
        ("model.", "", lambda name: name.removeprefix("model.")),
        ("a.b.", "", {r"^a\.": "", r"^b\.": ""}),
        ("", "inner.", {"^": "inner."}),
        ("", "", {}),
        ("", "", None),
    ],
)
def test_names_are_changed(front, own, rename, tmp_path):
    model = make(1)
    whole = nn.ModuleDict({own.removesuffix("."): model}) if own else model
    assert load(whole, write(tmp_path / "m.safetensors", front), rename=rename).is_complete
    assert len(same(model, make())) == 4


def test_names_are_left_out(tmp_path):
    model = make(1)
    path = write(tmp_path / "m.safetensors", **{"1.weight": torch.zeros(7, 7)})  # another number of classes
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        load(model, path)
    report = load(model, path, exclude=["1.*"])
    assert report.is_complete
    assert report.loaded == ("0.weight", "0.bias")
    assert same(model, make()) == {"0.weight", "0.bias"}
    assert same(model, make(1)) == {"1.weight", "1.bias"}


def test_a_tensor_that_neither_loads_nor_is_left_out_is_still_named(tmp_path):
    path = write(tmp_path / "m.safetensors", other=torch.ones(1))
    with pytest.raises(CheckpointError, match=r"1 tensors are unexpected: .*other"):
        load(make(1), path, rename={"^1": "1"}, exclude=["0.*"])
    assert load(make(1), path, exclude=["oth*"]).is_complete


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rename": {"(": ""}}, ConfigError, "`rename` is neither"),
        ({"rename": ["a"]}, ConfigError, "`rename` is neither"),
        ({"rename": lambda _: None}, ConfigError, "`rename` returned None for '0.bias'"),
        ({"rename": {"^.*$": "x"}}, CheckpointError, "gives the name 'x' to two tensors"),
        ({"exclude": "0.*"}, ConfigError, r"`exclude='0\.\*'` is no list"),
        ({"exclude": [3]}, ConfigError, "is no list of patterns"),
    ],
)
def test_bad_names(options, error, match, tmp_path):
    model = make(1)
    with pytest.raises(error, match=match):
        load(model, write(tmp_path / "m.safetensors"), **options)
    assert len(same(model, make(1))) == 4


# ---- an optimizer's own state_dict, as torch saves it


def trained(kind, seed=0, **options):
    model = make(seed)
    optimizer = getattr(torch.optim, kind)(
        [{"params": model[1].parameters(), "weight_decay": 0.1}, {"params": model[0].parameters()}], lr=0.05, **options
    )
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same_states(found, expected):
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, states in theirs["state"].items():
        assert ours["state"][number].keys() == states.keys()
        assert all(torch.equal(torch.as_tensor(ours["state"][number][name]), states[name]) for name in states)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("RMSprop", {"centered": True})],
)
def test_an_optimizers_file_of_torch(kind, options, tmp_path):
    _, optimizer = trained(kind, **options)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other_model, other = trained(kind, seed=1, **options)
    other.param_groups[0]["lr"] = 7.0
    adapter = ReplicatedStateAdapter(other_model, other, DistCoordinator())
    EngineCalls().load_optimizer(adapter, tmp_path / "optimizer.pt")
    assert_same_states(other, optimizer)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["param_groups"].pop(),
        lambda state: state["param_groups"][0].pop("params"),
        lambda state: state["param_groups"][0].update(params=[0]),
        lambda state: state["param_groups"][0].update(params=3),
        lambda state: state.update(param_groups=3),
        lambda state: state.update(state=[1]),
        lambda state: state["state"].update({9: {"exp_avg": torch.ones(2)}}),
        lambda state: state["state"].update({0: 3}),
        lambda state: state["state"][0].update(exp_avg=torch.ones(9)),
    ],
    ids=range(9),
)
def test_damaged_files_of_torch(change, tmp_path):
    model, optimizer = trained("AdamW")
    state = optimizer.state_dict()
    change(state)
    torch.save(state, tmp_path / "optimizer.pt")
    adapter = ReplicatedStateAdapter(model, optimizer, DistCoordinator())
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        EngineCalls().load_optimizer(adapter, tmp_path / "optimizer.pt")


# ---- folders of torch.distributed.checkpoint with a nested state


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("names", [("model", "optimizer"), ("app.model", "app.optim")])
def test_nested_folders_of_torch(names, flat, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # torch sets it for good on import
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer = trained("AdamW")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    parts = (model.state_dict(), get_optimizer_state_dict(model, optimizer, options=options))
    state = {"step": 3}
    for name, part in zip(names, parts, strict=True):
        inner = state
        *outer, last = name.split(".")
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = part
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    other_model, other = trained("AdamW", seed=1)
    adapter = ReplicatedStateAdapter(other_model, other, DistCoordinator())
    io = EngineCalls()
    assert io.load_model(adapter, tmp_path / "c").is_complete
    io.load_optimizer(adapter, tmp_path / "c")
    assert len(same(other_model, model)) == 4
    assert_same_states(other, optimizer)


def rename_badly_on_one_rank(path):
    def rename(name):
        if DistCoordinator().rank == 1:
            raise KeyError(name)
        return name

    booster, model = Booster("cpu", None, ReferencePlugin()), make(1)
    model, *_ = booster.boost(model)
    booster.load_model(model, path, rename=rename)


def test_a_function_that_fails_on_one_rank_raises_on_all(tmp_path):
    path = write(tmp_path / "m.safetensors")
    expect_on_ranks(KeyError, "0.bias", rename_badly_on_one_rank, 2, str(path))


def test_a_path_below_home_is_not_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    booster, model = Booster("cpu"), nn.Linear(2, 2)
    booster.save_model(model, "~/out/model.safetensors")
    booster.save_checkpoint("~/run", step=1, model=model)
    assert booster.has_checkpoint(tmp_path / "home" / "run")
    assert booster.load_checkpoint("~/run", model=model).step == 1
    assert booster.load_model(model, tmp_path / "home" / "out" / "model.safetensors").is_complete
    assert not (tmp_path / "~").exists()
