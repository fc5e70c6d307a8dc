"""Names that are changed or left out on load, by arguments and by hooks, and states that others nest or number."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_calls import EngineCalls
from engine_calls import load_module as load
from ranked import raises_on_ranks
from reference_plugins import ReferencePlugin
from safetensors.torch import save_file
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing.compare import EXACT, assert_same_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # DCP's writer of torch 2.10 uses it
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch says so of `no_dist=True`
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


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
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


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
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


@raises_on_ranks(KeyError, "0.bias", 2)
def test_a_function_that_fails_on_one_rank_raises_on_all(tmp_path):
    def rename(name):
        if DistCoordinator().rank == 1:
            raise KeyError(name)
        return name

    booster, model = Booster("cpu", None, ReferencePlugin()), make(1)
    model, *_ = booster.boost(model)
    booster.save_model(model, tmp_path / "m.safetensors")
    booster.load_model(model, tmp_path / "m.safetensors", rename=rename)


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


# ---- a model's own load hooks, which run as in ``load_state_dict``: old names, other layouts, computed values


def rename(state, prefix, *_):
    for name in ("weight", "bias"):
        if f"{prefix}old.{name}" in state:
            state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}old.{name}")


def rename_with_module(module, state, prefix, *rest):
    assert isinstance(module, Outer)
    rename(state, prefix, *rest)


def transpose(state, prefix, *_):
    state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].t()


def join(state, prefix, *_):
    for name in ("weight", "bias"):
        parts = [state.pop(f"{prefix}inner.{part}.{name}") for part in "qv"]
        state[f"{prefix}inner.{name}"] = torch.cat(parts)


def drop_for_old_files(state, prefix, metadata, *_):
    if metadata.get("version") is None:
        state.pop(f"{prefix}inner.old", None)


class Outer(nn.Module):
    def __init__(self, hook=None, *, with_module=False):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        if hook is not None and with_module:
            self.register_load_state_dict_pre_hook(hook)
        elif hook is not None:
            self._register_load_state_dict_pre_hook(hook)


class Overriding(Outer):
    def _load_from_state_dict(self, state, prefix, *rest):
        rename(state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)


class OwnTensors(nn.Module):
    """Hands on another dict, with a transposed tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("count", torch.zeros(2))

    def _load_from_state_dict(self, state, prefix, *rest):
        ours = {f"{prefix}weight": state.pop(f"{prefix}kernel").t(), f"{prefix}count": state[f"{prefix}count"]}
        super()._load_from_state_dict(ours, prefix, *rest)


def weight_norm(new):
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(layer) if new else nn.utils.weight_norm(layer))


def changed(**names):
    """Return a function that renames what a model's file holds."""

    def change(state):
        return {names.get(key, key): value for key, value in state.items()}

    return change


OLD_NAMES = changed(**{"1.inner.weight": "1.old.weight", "1.inner.bias": "1.old.bias"})


def split(state):
    state = dict(state)
    for name in ("weight", "bias"):
        state["1.inner.q." + name], state["1.inner.v." + name] = state.pop("1.inner." + name).chunk(2)
    return state


def in_model(make):
    return lambda: nn.Sequential(nn.Linear(4, 4), make())


CASES = {
    "hook": (in_model(lambda: Outer(rename)), OLD_NAMES),
    "hook of present names": (in_model(lambda: Outer(rename)), dict),
    "hook with module": (in_model(lambda: Outer(rename_with_module, with_module=True)), OLD_NAMES),
    "override": (in_model(Overriding), OLD_NAMES),
    "square transpose": (in_model(lambda: Outer(transpose)), dict),
    "joined": (in_model(lambda: Outer(join)), split),
    "version": (in_model(lambda: Outer(drop_for_old_files)), lambda s: {**s, "1.inner.old": torch.ones(2)}),
    "own tensors": (in_model(OwnTensors), lambda s: {**s, "1.kernel": torch.rand(2, 3)}),
    "weight norm": (lambda: weight_norm(new=True), lambda _: weight_norm(new=False).state_dict()),
    "root": (lambda: Outer(rename), changed(**{"inner.weight": "old.weight", "inner.bias": "old.bias"})),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_hooks_run_as_in_load_state_dict(case, tmp_path):
    make, change = CASES[case]
    torch.manual_seed(0)
    written = {name: tensor.clone() for name, tensor in change(make().state_dict()).items()}
    if case == "own tensors":
        del written["1.weight"]
    torch.save(written, tmp_path / "model.bin")
    plain, model = make(), make()
    plain.load_state_dict({name: tensor.clone() for name, tensor in written.items()})
    before = [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    boosted, *_ = Booster("cpu").boost(model)
    assert Booster("cpu").load_model(boosted.unwrap(), tmp_path / "model.bin").is_complete
    assert_same_tensors(model.state_dict(), plain.state_dict(), EXACT)
    assert [(name, id(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]] == before


def test_a_hook_that_needs_values_says_what_to_do(tmp_path):
    model = Outer(lambda state, *_: state["inner.weight"].sum().item())
    torch.save(model.state_dict(), tmp_path / "model.bin")
    with pytest.raises(
        CheckpointError, match=r"load hooks .* raised RuntimeError: .*load it into the model before `boost`"
    ):
        Booster("cpu").load_model(model, tmp_path / "model.bin")


def test_names_that_differ_are_renamed_rather_than_left(tmp_path):
    torch.save({"body.weight": torch.ones(2, 2)}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"If names differ, pass `rename=`.* before `boost`"):
        Booster("cpu").load_model(nn.Linear(2, 2, bias=False), tmp_path / "model.bin")
