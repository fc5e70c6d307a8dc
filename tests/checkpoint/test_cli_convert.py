from __future__ import annotations

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from resumable import ResumableRun
from safetensors.torch import load_file

from booster_checkpoint.load.source import Source
from booster_checkpoint.storage import locate
from booster_checkpoint.tools.convert import convert
from booster_core import Booster
from booster_core.cli import main
from booster_core.errors import CheckpointError, ConfigError
from booster_testing import peak_memory

FORMS = {
    "safetensors": {"shard": True},
    "bin": {"shard": True, "use_safetensors": False},
    "dcp": {"gather_dtensor": False},
}


class Odd(torch.nn.Module):
    """Tied weights, many dtypes, no dimension, no elements, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(7, 5)
        self.tied = torch.nn.Linear(7, 5)
        self.tied.weight = self.linear.weight
        self.narrow = torch.nn.Parameter(torch.randn(3, 4).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.zeros(0, 3))

    def get_extra_state(self):
        return {"names": ("a", "b"), "scale": torch.tensor([2.0, 3.0])}

    def set_extra_state(self, state):
        self.extra = state


def run(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def training():
    training = ResumableRun()
    training.train(3)
    return training


@pytest.mark.parametrize(("source", "target"), [*itertools.product(FORMS, FORMS)])
def test_every_form_becomes_every_other(source, target, training, tmp_path):
    booster, model, again = training.booster, Odd(), Odd()
    booster.save_model(model, tmp_path / "source", **FORMS[source])
    result = run(tmp_path / "source", tmp_path / "target", "--to", target)
    assert result.exit_code == 0, result.output
    booster.load_model(again, tmp_path / "target")
    expected = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in expected.items())
    assert again.extra["names"] == ("a", "b")
    assert again.extra["scale"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(("source", "target"), [("safetensors", "dcp"), ("dcp", "safetensors")])
def test_an_optimizer_is_converted(source, target, training, tmp_path):
    training.booster.save_optimizer(training.optimizer, tmp_path / "optimizer", **FORMS[source])
    result = run(tmp_path / "optimizer", tmp_path / "optimizer-2", "--to", target)
    assert result.exit_code == 0, result.output
    before = training.tensors()
    other = ResumableRun()
    other.booster.load_optimizer(other.optimizer, tmp_path / "optimizer-2")
    after = other.tensors()
    states = [name for name in before if "/" in name]
    assert states
    assert all(torch.equal(before[name], after[name]) for name in states)


def test_a_file_becomes_a_file(training, tmp_path):
    model = torch.nn.Linear(4, 4)
    training.booster.save_model(model, tmp_path / "a.safetensors")
    assert run(tmp_path / "a.safetensors", tmp_path / "b.bin", "--to", "bin").exit_code == 0
    assert torch.equal(torch.load(tmp_path / "b.bin", weights_only=True)["weight"], model.weight)
    assert run(tmp_path / "b.bin", tmp_path / "c.safetensors", "--to", "safetensors").exit_code == 0
    assert torch.equal(load_file(tmp_path / "c.safetensors")["weight"], model.weight)


def test_other_files_of_a_folder_come_along(training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "a", shard=True)
    (tmp_path / "a" / "config.json").write_text('{"model_type": "none"}')
    assert run(tmp_path / "a", tmp_path / "b", "--to", "bin").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.json",
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
    ]


@pytest.mark.parametrize(
    "form", [pytest.param("safetensors", marks=pytest.mark.slow), pytest.param("bin", marks=pytest.mark.slow), "dcp"]
)
def test_memory_stays_bounded(form, training, tmp_path):
    model = torch.nn.ModuleList(torch.nn.Linear(1024, 6 * 1024, bias=False) for _ in range(10))  # 240 MiB
    training.booster.save_model(model, tmp_path / "a", shard=True, size_per_shard=50)
    del model
    convert(locate(tmp_path / "a"), locate(tmp_path / "warm"), form)
    with peak_memory() as memory:
        convert(locate(tmp_path / "a"), locate(tmp_path / "b"), form)
    assert memory.peak_bytes < 120 << 20


@pytest.mark.parametrize(
    ("target", "form", "message"),
    [
        ("b.bin", "safetensors", "does not name what `--to safetensors` writes"),
        ("b.safetensors", "dcp", "does not name what `--to dcp` writes"),
        ("there", "bin", "exists already"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(target, form, message, training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "a", shard=True)
    (tmp_path / "there").mkdir()
    result = run(tmp_path / "a", tmp_path / target, "--to", form)
    assert result.exit_code == 1
    assert message in result.output


def test_a_training_state_is_not_taken_for_a_model(training, tmp_path):
    training.save(tmp_path / "root")
    result = run(tmp_path / "root" / "step-00000003", tmp_path / "b", "--to", "bin")
    assert result.exit_code == 1
    assert "Pass '" in result.output
    assert "model'" in result.output


def test_a_damaged_source_leaves_nothing_behind(training, tmp_path):
    training.booster.save_model(torch.nn.Linear(400, 400), tmp_path / "a", shard=True)
    file = next((tmp_path / "a").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        convert(locate(tmp_path / "a"), locate(tmp_path / "b"), "bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("form", FORMS)
def test_converts_the_dtype_of_a_model(form, tmp_path):
    booster = Booster("cpu")
    model = Odd()
    booster.save_model(model, tmp_path / "source", shard=True)
    (tmp_path / "source" / "config.json").write_text('{"dtype": "float32", "n": 1}')
    options = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--to", form, "--dtype", "bf16"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    source = Source(tmp_path / "target", "model")
    try:
        assert torch.equal(source.read_whole("linear.bias"), model.linear.bias.bfloat16())
        assert source.tensors["count"].dtype == torch.int64
    finally:
        source.close()
    if form != "dcp":
        assert json.loads((tmp_path / "target" / "config.json").read_text()) == {"dtype": "bfloat16", "n": 1}


def test_an_optimizer_keeps_its_dtypes(tmp_path):
    run = ResumableRun()
    run.train(1)
    run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    with pytest.raises(ConfigError, match="keeps its dtypes"):
        convert(locate(tmp_path / "optimizer.safetensors"), locate(tmp_path / "o"), "safetensors", dtype=torch.bfloat16)


def save_nested(run, folder, **more):
    """Let torch write a model and its optimizer into one folder."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(run.model.unwrap(), run.optimizer.unwrap())
    dcp.save({"model": model, "optimizer": optimizer, **more}, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def nested(training, tmp_path, monkeypatch):
    """A folder with both of them, as scripts on torch alone write it, and the run that it is of."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # torch sets it for good on import
    save_nested(training, tmp_path / "nested", step=3)
    return tmp_path / "nested"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so of `no_dist=True`
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_nested_folder_keeps_its_optimizer(nested, training, tmp_path, caplog):
    result = run(nested, tmp_path / "b", "--to", "safetensors")
    assert result.exit_code == 0, result.output
    assert "also holds 'step'" in caplog.text
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "optimizer-00001-of-00001.safetensors",
        "optimizer.safetensors.index.json",
        "param_groups.json",
    ]
    other = ResumableRun()
    other.booster.load_model(other.model, tmp_path / "b")
    other.booster.load_optimizer(other.optimizer, tmp_path / "b")
    before, after = training.tensors(), other.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    shown = CliRunner().invoke(main, ["inspect", str(nested)])
    assert "model and optimizer" in shown.output.splitlines()[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so of `no_dist=True`
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("target", ["b.safetensors", "b"])
def test_a_nested_folder_never_loses_its_optimizer_in_silence(target, nested, tmp_path):
    form = "dcp" if target == "b" else "safetensors"
    result = run(nested, tmp_path / target, "--to", form)
    assert result.exit_code == 1
    assert "holds a model and an optimizer" in result.output


def test_a_large_file_beside_the_tensors_is_copied_in_pieces(training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "a", shard=True)
    with (tmp_path / "a" / "notes.txt").open("wb") as file:
        file.truncate(300 << 20)
    convert(locate(tmp_path / "a"), locate(tmp_path / "warm"), "bin")
    with peak_memory() as memory:
        convert(locate(tmp_path / "a"), locate(tmp_path / "b"), "bin")
    assert memory.peak_bytes < 64 << 20
    assert (tmp_path / "b" / "notes.txt").stat().st_size == 300 << 20


def test_the_files_of_a_dcp_folder_are_not_copied_beside_what_they_became(training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "a", gather_dtensor=False)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    convert(locate(tmp_path / "a"), locate(tmp_path / "b"), "safetensors")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "notes.txt",
    ]
