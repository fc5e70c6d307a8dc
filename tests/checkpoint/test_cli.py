"""`booster convert` and `booster inspect`: what they write, show and check, and what they refuse."""

import itertools
import json
import re
import shutil

import pytest
import torch
from click.testing import CliRunner
from resumable import ResumableRun
from safetensors.torch import load_file

from booster_checkpoint.load.source import open_source
from booster_checkpoint.storage import locate
from booster_checkpoint.tools.convert import convert
from booster_core import Booster
from booster_core.cli import main
from booster_core.errors import CheckpointError
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


@pytest.mark.parametrize(
    ("source", "target", "base"), [("safetensors", "bin", "pytorch_model"), ("dcp", "safetensors", "model")]
)
def test_other_files_of_a_folder_come_along(source, target, base, training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "a", **FORMS[source])
    (tmp_path / "a" / "config.json").write_text('{"model_type": "none"}')
    assert run(tmp_path / "a", tmp_path / "b", "--to", target).exit_code == 0
    names = {"config.json", f"{base}-00001-of-00001.{target}", f"{base}.{target}.index.json"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names


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
    ("source", "target", "form", "message"),
    [
        ("model", "b.bin", "safetensors", "does not name what `--to safetensors` writes"),
        ("model", "b.safetensors", "dcp", "does not name what `--to dcp` writes"),
        ("model", "there", "bin", "exists already"),
        ("root/step-00000003", "b", "bin", r"(?s)Pass '.*model'"),
        ("optimizer.safetensors", "b", "safetensors --dtype bf16", "keeps its dtypes"),
    ],
)
def test_what_does_not_fit_is_refused(source, target, form, message, training, tmp_path):
    training.booster.save_model(torch.nn.Linear(4, 4), tmp_path / "model", shard=True)
    training.booster.save_optimizer(training.optimizer, tmp_path / "optimizer.safetensors")
    training.save(tmp_path / "root")
    (tmp_path / "there").mkdir()
    result = run(tmp_path / source, tmp_path / target, "--to", *form.split())
    assert result.exit_code == 1
    assert re.search(message, result.output)


def test_a_damaged_source_leaves_nothing_behind(training, tmp_path):
    training.booster.save_model(torch.nn.Linear(400, 400), tmp_path / "a", shard=True)
    file = next((tmp_path / "a").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        convert(locate(tmp_path / "a"), locate(tmp_path / "b"), "bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("form", FORMS)
def test_converts_the_dtype_of_a_model(form, tmp_path):
    model = Odd()
    Booster("cpu").save_model(model, tmp_path / "source", shard=True)
    (tmp_path / "source" / "config.json").write_text('{"dtype": "float32", "n": 1}')
    result = run(tmp_path / "source", tmp_path / "target", "--to", form, "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    with open_source(tmp_path / "target", "model") as source:
        assert torch.equal(source.read_whole("linear.bias"), model.linear.bias.bfloat16())
        assert source.tensors["count"].dtype == torch.int64
    if form != "dcp":
        assert json.loads((tmp_path / "target" / "config.json").read_text()) == {"dtype": "bfloat16", "n": 1}


@pytest.fixture
def nested(training, tmp_path, monkeypatch):
    """A folder with model and optimizer, as scripts on torch alone write it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # torch sets it for good on import
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model.unwrap(), training.optimizer.unwrap())
    state = {"model": model, "optimizer": optimizer, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "nested", no_dist=True)
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


# ---- `booster inspect`


def inspect(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root with two steps."""
    folder = tmp_path_factory.mktemp("root")
    training = ResumableRun()
    for step in (3, 6):
        training.train(step)
        training.save(folder, extra={"best": 0.5})
    return folder


@pytest.fixture
def model(tmp_path):
    """A Booster and a model with two tensors, to be saved in ``tmp_path``."""
    return ResumableRun().booster, torch.nn.Linear(3, 5).bfloat16()


def test_a_training_state_shows_what_wrote_it_and_its_tensors(root):
    result = inspect(root / "step-00000006")
    assert result.exit_code == 0, result.output
    for text in ("training state", "step: 6", "torch", "CosineAnnealingLR", "extra: best", "random states: of 1 rank"):
        assert text in result.output
    lines = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    file = "model/model-00001-of-00001.safetensors"
    assert lines["first.weight"] == ["float32", "32x8", "1,024", file]
    assert lines["seen"] == ["int64", "scalar", "8", file]
    assert lines["first.weight/exp_avg"][:3] == ["float32", "32x8", "1,024"]
    assert result.output.splitlines()[-1].startswith("17 tensors, ")


@pytest.mark.parametrize("spoil", [lambda content: content[:40], lambda content: content.replace(b"3", b"4")])
def test_a_root_lists_its_steps_also_after_a_damaged_manifest(spoil, root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    manifest = tmp_path / "root" / "step-00000003" / "manifest.json"
    manifest.write_bytes(spoil(manifest.read_bytes()))
    result = inspect(tmp_path / "root")
    assert result.exit_code == 0
    assert "latest: step-00000006" in result.output
    assert "step-00000003: not whole: " in result.output
    assert "step-00000006: 1" in result.output or "step-00000006: 2" in result.output
    assert inspect("--check", tmp_path / "root").exit_code == 1


def test_json_holds_the_same(root):
    found = json.loads(inspect("--json", root / "step-00000006" / "model").output)
    assert found["kind"] == "model"
    assert {row["name"]: row["shape"] for row in found["tensors"]}["second.weight"] == [4, 32]


def test_the_optimizers_folder_shows_its_groups(root):
    result = inspect(root / "step-00000003" / "optimizer")
    assert "optimizer" in result.output.splitlines()[0]
    assert "parameter groups: 4 parameters, " in result.output
    assert "weight_decay=0.01" in result.output


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one.safetensors", {}),
        ("one.bin", {"use_safetensors": False}),
        ("folder", {"shard": True}),
        ("folder", {"shard": True, "use_safetensors": False}),
        ("dcp", {"gather_dtensor": False}),
    ],
)
def test_every_form_of_a_model(name, options, model, tmp_path):
    booster, module = model
    booster.save_model(module, tmp_path / name, **options)
    result = inspect(tmp_path / name)
    assert result.exit_code == 0, result.output
    assert "weight  bfloat16  5x3" in result.output
    assert "2 tensors, 40 bytes, 1 files" in result.output


def test_no_values_are_read(root, tmp_path):
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-100:] = b"\xff" * 100
    file.write_bytes(content)
    assert inspect(tmp_path / "model").output.count("float32") == 4


@pytest.mark.parametrize(
    ("content", "message"), [(b"short", "too few for a safetensors file"), (b"\xff" * 100, "announces a header of")]
)
def test_what_is_no_checkpoint_is_an_error(content, message, tmp_path):
    (tmp_path / "it").write_bytes(content)
    result = inspect(tmp_path / "it")
    assert result.exit_code == 1
    assert message in result.output


# ---- whether it is whole; what damage it names is in `test_training_faults`


def check(path):
    result = inspect("--check", path)
    return result.exit_code, result.output


def test_what_is_whole_passes_and_it_says_what_it_could_not_check(root, tmp_path):
    for path in ("", "step-00000006", "step-00000006/model", "step-00000006/optimizer"):
        code, output = check(root / path)
        assert code == 0, output
        assert "whole (checked sizes and checksums" in output
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    assert "there is no manifest with checksums" in check(tmp_path / "model")[1]
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("first.weight", "third.weight"))
    code, output = check(tmp_path / "model")
    assert code == 1
    assert "'third.weight'" in output
    assert "There is no model checkpoint" in check(tmp_path / "none")[1]
