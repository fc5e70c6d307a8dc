"""What core saves and loads by itself, beside what safetensors and torch say of the same state."""

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

from booster_core import Booster, CheckpointIO, checkpoint_io, plain_checkpoint_io
from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.errors import CheckpointError, ConfigError
from booster_core.plain_checkpoint_io import PlainCheckpointIO
from booster_testing import expect_on_ranks, run_on_ranks


class Extra(nn.Module):
    """Has a state that is no tensor of its own."""

    def __init__(self):
        super().__init__()
        self.seen = {"count": 0, "scale": torch.zeros(3)}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Model(nn.Module):
    """Tied weights, buffers, tensors of several formats."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 8, bias=False)
        self.third = nn.Linear(16, 8, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(5).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.extra = Extra()

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.second(hidden) + self.third(hidden)


class Run:
    """A run of one process that saves by core alone."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.booster = Booster("cpu")
        self.booster.checkpoint_io = PlainCheckpointIO(self.booster.plugin, self.booster.context)
        own = Model()
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(own, optimizer, lr_scheduler=scheduler)
        self.own = own

    def train(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.own.extra.seen["count"] += 1


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def is_same(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- files


def test_a_model_is_what_safetensors_reads(tmp_path):
    run = Run()
    run.train(2)
    path = tmp_path / "new" / "m.safetensors"
    run.booster.save_model(run.model, path)
    saved, expected = safetensors.torch.load_file(path), values(run.own)
    assert saved.keys() == expected.keys() - {"third.weight"} | {"extra._extra_state/scale"}
    for name in saved.keys() & expected.keys():
        assert saved[name].dtype == expected[name].dtype
        assert torch.equal(saved[name], expected[name])
    assert names_in(tmp_path) == ["new/m.safetensors"]

    other = Run(seed=1)
    report = other.booster.load_model(other.model, path)
    assert report.is_complete
    assert is_same(other.own, expected)
    assert other.own.extra.seen["count"] == 2
    assert torch.equal(other.own.extra.seen["scale"], torch.zeros(3))


def test_a_file_of_safetensors_loads(tmp_path):
    source = Run()
    expected = values(source.own)
    named = {name: tensor.contiguous() for name, tensor in expected.items() if name != "second.weight"}
    safetensors.torch.save_file(named, tmp_path / "model.safetensors")
    run = Run(seed=1)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: 'extra\._extra_state'"):
        run.booster.load_model(run.model, tmp_path)
    report = run.booster.load_model(run.model, tmp_path, strict=False)
    assert report.missing == ("extra._extra_state",)
    assert is_same(run.own, expected)


def test_a_model_that_does_not_fit_changes_nothing(tmp_path):
    run = Run()
    run.booster.save_model(nn.Linear(3, 3), tmp_path / "m.safetensors")
    before = values(run.own)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        run.booster.load_model(run.model, tmp_path / "m.safetensors")
    assert is_same(run.own, before)


def test_an_optimizer_goes_on_as_one_that_torch_loads(tmp_path):
    run = Run()
    run.train(3)
    run.booster.save_optimizer(run.optimizer, tmp_path / "o.safetensors")
    stored = run.optimizer.state_dict()
    tensors = safetensors.torch.load_file(tmp_path / "o.safetensors")
    position = [name for name, _ in run.own.named_parameters()].index("first.weight")
    assert torch.equal(tensors["first.weight/exp_avg"], stored["state"][position]["exp_avg"])
    other = Run(seed=1)
    other.booster.load_optimizer(other.optimizer, tmp_path / "o.safetensors")
    loaded = other.optimizer.state_dict()
    assert loaded["param_groups"] == stored["param_groups"]
    assert loaded["state"].keys() == stored["state"].keys()
    for position, state in stored["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][position][name], value)


def test_another_optimizer_is_refused(tmp_path):
    run = Run()
    run.train(1)
    run.booster.save_optimizer(run.optimizer, tmp_path / "o.safetensors")
    booster, model = run.booster, nn.Linear(2, 2)
    _boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match="is of another optimizer"):
        booster.load_optimizer(optimizer, tmp_path / "o.safetensors")


def test_state_that_would_be_lost_is_refused(tmp_path):
    run, model = Run(), nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, *rest: state.update(scale=torch.ones(1)))
    with pytest.raises(CheckpointError, match="1 entries of the model's `state_dict` would be lost: 'scale'"):
        run.booster.save_model(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


# ---- what goes wrong


def test_an_older_file_survives_a_failure(tmp_path, monkeypatch):
    def cut(tensors, path, metadata):
        """Write a part of a file, as where the disk is full."""
        path.write_bytes(b"the first bytes")
        raise OSError(28, "No space left on device")

    path, run = tmp_path / "m.safetensors", Run()
    run.booster.save_model(run.model, path)
    before = path.read_bytes()
    run.train(1)
    monkeypatch.setattr(plain_checkpoint_io, "save_file", cut)
    with pytest.raises(CheckpointError, match=r"m\.safetensors' cannot be written: No space left on device"):
        run.booster.save_model(run.model, path)
    assert path.read_bytes() == before
    with pytest.raises(CheckpointError, match="No space left"):
        run.booster.save_model(run.model, tmp_path / "new" / "m.safetensors")
    assert names_in(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{", b"{}", b"\xff" * 40])
def test_other_files_are_refused(content, tmp_path):
    run = Run()
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read as safetensors: .*pip install booster-checkpoint"):
        run.booster.load_model(run.model, path)


def test_a_folder_of_two_saves_is_refused(tmp_path):
    run = Run()
    run.booster.save_model(run.model, tmp_path / "model.safetensors")
    (tmp_path / ".model.safetensors.index.json.interrupted").touch()
    with pytest.raises(CheckpointError, match="was interrupted"):
        run.booster.load_model(run.model, tmp_path)


# ---- what needs another engine


REFUSED = {
    "shard": lambda run, path: run.booster.save_model(run.model, path / "m", shard=True),
    "bin": lambda run, path: run.booster.save_model(run.model, path / "m.bin"),
    "torch.save": lambda run, path: run.booster.save_model(run.model, path / "m", use_safetensors=False),
    "dcp": lambda run, path: run.booster.save_model(run.model, path / "m", gather_dtensor=False),
    "background": lambda run, path: run.booster.save_model(run.model, path / "m", use_async=True),
    "variant": lambda run, path: run.booster.save_model(run.model, path / "m", prefix="ema"),
    "optimizer": lambda run, path: run.booster.save_optimizer(run.optimizer, path / "o", shard=True),
    "step": lambda run, path: run.booster.save_checkpoint(path / "run", step=1, model=run.model),
    "step-load": lambda run, path: run.booster.load_checkpoint(path / "run", model=run.model),
    "steps": lambda run, path: run.booster.has_checkpoint(path / "run"),
    "url": lambda run, _: run.booster.save_model(run.model, "memory://m.safetensors"),
    "url-load": lambda run, _: run.booster.load_model(run.model, "memory://m.safetensors"),
    "rename": lambda run, path: run.booster.load_model(run.model, path, rename={"a": "b"}),
    "exclude": lambda run, path: run.booster.load_model(run.model, path, exclude=["a"]),
    "folder": lambda run, path: run.booster.load_model(run.model, path),
    "lora": lambda run, path: run.booster.save_lora_as_pretrained(run.model, path),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_another_engine_does_is_refused_by_its_name(call, tmp_path):
    run = Run()
    before = values(run.own)
    with pytest.raises((CheckpointError, ConfigError), match="Run `pip install booster-checkpoint`"):
        REFUSED[call](run, tmp_path)
    assert is_same(run.own, before)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_its_own_folder_form_needs_a_file_name(tmp_path):
    run, model = Run(), nn.Linear(2, 2)
    model.save_pretrained = lambda folder: None
    with pytest.raises(ConfigError, match=r"pip install booster-checkpoint`. Or pass '.*out\.safetensors'"):
        run.booster.save_model(model, tmp_path / "out")
    run.booster.save_model(model, tmp_path / "out.safetensors")
    assert names_in(tmp_path) == ["out.safetensors"]


def save_on_ranks(folder):
    booster = Booster("cpu")
    booster.checkpoint_io = PlainCheckpointIO(booster.plugin, booster.context)
    booster.save_model(nn.Linear(2, 2), folder + "/m.safetensors")


def test_several_ranks_are_refused_on_each(tmp_path):
    expect_on_ranks(
        CheckpointError, "`save_model` of several ranks is done by booster-checkpoint", save_on_ranks, 2, str(tmp_path)
    )
    assert list(tmp_path.iterdir()) == []
    run_on_ranks(save_on_ranks, 1, str(tmp_path))
    assert names_in(tmp_path) == ["m.safetensors"]


# ---- which engine


ENTRY = SimpleNamespace(name="files", dist=None, load=lambda: CheckpointIO)
"""An entry point of a distribution."""


@pytest.mark.parametrize(("entries", "expected"), [([], PlainCheckpointIO), ([ENTRY], CheckpointIO)])
def test_an_installed_engine_goes_before_the_plain_one(entries, expected, monkeypatch):
    by_name = {entry.name: [entry] for entry in entries}
    monkeypatch.setattr(checkpoint_io, "entry_points_by_name", lambda _: by_name)
    assert checkpoint_io_class() is expected
