"""`load_model` runs a model's load hooks as ``load_state_dict`` does: old names, other layouts, computed values."""

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_testing.compare import EXACT, assert_same_tensors


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
