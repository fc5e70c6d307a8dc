"""``save_pretrained`` under every plugin: stock ``from_pretrained`` loads what was trained, or an error says why."""

import json
from pathlib import Path

import pytest
import torch
from cases import Setting
from isolated_libraries import FOLDER, missing_libraries
from matrix import matrix
from model_zoo import get_model
from plugin_runs import runs, step
from pretrained_models import Saves, load, make_model, tokens, trained_in_one_process
from ranked import raises_on_ranks
from safetensors.torch import load_file
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

pytest.importorskip("transformers", reason="needs the extra 'transformers'")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra 'transformers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]

RUNS = {
    **runs("single", "ddp", "fsdp", "zero2", "gemini", "hybrid-tp", "hybrid-pp"),
    "zero1": Setting(LowLevelZeroPlugin, {"overlap_allgather": True}),
}
SHARDED = [name for name in RUNS if name not in ("single", "ddp")]


def boost(run, lora=None):
    booster, model = RUNS[run].make_booster(), make_model()
    if lora is not None:
        model = booster.enable_lora(model, lora_config=lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return booster, *booster.boost(model, optimizer)[:2]


def train(booster, model, optimizer):
    """Take a step; every rank sees the same batch, so that the run equals one process'."""
    step(booster, model, optimizer, {"input_ids": tokens(), "labels": tokens()})


def train_and_save(run, folder):
    booster, model, optimizer = boost(run)
    train(booster, model, optimizer)
    model.save_pretrained(f"{folder}/ours")
    if run not in SHARDED and booster.context.coordinator.is_master():
        model.unwrap().save_pretrained(f"{folder}/own")
    booster.save_model(model, f"{folder}/Tiny-0.5-Base")
    saved = load(f"{folder}/Tiny-0.5-Base").state_dict()
    train(booster, model, optimizer)
    assert booster.load_model(model, f"{folder}/Tiny-0.5-Base").is_complete
    booster.save_model(model, f"{folder}/again.safetensors")
    assert_same_tensors(load_file(f"{folder}/again.safetensors"), saved, EXACT)


@pytest.mark.parametrize("run", RUNS)
def test_from_pretrained_loads_what_save_pretrained_and_save_model_write_by_default(run, tmp_path):
    """The path of `save_model` has no suffix of a file, though it has a dot; one that has stays a file."""
    run_on_ranks(train_and_save, RUNS[run].num_ranks, run, str(tmp_path))
    folder = tmp_path / "Tiny-0.5-Base"
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    expected = trained_in_one_process()
    for loaded in map(load, (folder, tmp_path / "ours", *([] if run in SHARDED else [tmp_path / "own"]))):
        assert_same_tensors(loaded.state_dict(), expected.state_dict(), tolerance_for(torch.float32))
        assert not torch.equal(loaded.lm_head.weight, make_model().lm_head.weight), "the step is in it"
    expected.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / who / name).read_text()) for who in ("ours", "theirs"))
        assert ours == theirs, name
    assert (tmp_path / "again.safetensors").is_file()
    assert not (tmp_path / "config.json").exists()


def test_save_model_by_default_replaces_other_forms_in_the_folder(tmp_path):
    booster, models = Booster("cpu"), []
    for options in ({"shard": True}, {"use_safetensors": False}, {}):
        torch.manual_seed(len(models))
        models.append(tiny_llama())
        booster.save_model(models[-1], tmp_path, **options)
        assert_same_tensors(load(tmp_path).state_dict(), models[-1].state_dict(), EXACT)
        assert len([path for path in tmp_path.iterdir() if path.suffix in (".bin", ".safetensors")]) == 1
    variant, model = tmp_path / "variant", models[-1]
    booster.save_model(model, variant, prefix="ema")
    assert_same_tensors(load(variant, variant="ema").state_dict(), model.state_dict(), EXACT)


class WithValue(nn.Module):
    """A policy and a head that takes its embeddings, under one name more."""

    def __init__(self, policy):
        super().__init__()
        self.value = nn.Linear(policy.config.hidden_size, 1)
        self.embeddings = policy.get_input_embeddings()
        self.policy = policy

    def forward(self, input_ids, labels):
        return (
            self.policy(input_ids=input_ids, labels=labels).loss
            + self.value(self.embeddings(input_ids)).square().mean()
        )


def make_with_value(policy):
    torch.manual_seed(1)
    model = WithValue(policy)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def save_part(run, folder, lora=None):
    booster, policy = RUNS[run].make_booster(), make_model()
    if lora is not None:
        policy = booster.enable_lora(policy, lora_config=lora)
    model, optimizer, *_ = booster.boost(*make_with_value(policy))

    def take_step():
        booster.backward(model(input_ids=tokens(), labels=tokens()), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    take_step()
    if lora is not None:
        booster.save_lora_as_pretrained(model.policy, folder)
        return
    booster.save_model(model.policy, folder)
    booster.save_model(model.policy.model, f"{folder}/body.safetensors")
    take_step()
    assert booster.load_model(model.policy, folder).is_complete
    booster.save_model(model.policy, f"{folder}/again.safetensors")
    if run in SHARDED:
        with pytest.raises(ConfigError, match=r"Call `booster.save_model\(part, folder\)` with this module as `part`"):
            model.policy.save_pretrained(f"{folder}/native")
    else:
        model.policy.save_pretrained(f"{folder}/native-{booster.context.coordinator.rank}")


@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("hybrid")])
def test_a_part_is_written_and_read_like_a_model(run, tmp_path):
    run_on_ranks(save_part, RUNS[run].num_ranks, run, str(tmp_path))
    model, optimizer = make_with_value(make_model())
    model(input_ids=tokens(), labels=tokens()).backward()
    optimizer.step()
    expected, found = model.policy.state_dict(), load(tmp_path).state_dict()
    assert_same_tensors(found, expected, tolerance_for(torch.float32))
    assert_same_tensors(load_file(tmp_path / "again.safetensors"), found, EXACT)
    body = {name.removeprefix("model."): each for name, each in found.items() if name.startswith("model.")}
    assert_same_tensors(load_file(tmp_path / "body.safetensors"), body, EXACT)
    if run not in SHARDED:
        assert_same_tensors(load(tmp_path / "native-0").state_dict(), expected, tolerance_for(torch.float32))


def test_adapters_of_a_part_are_written_as_those_of_a_model(tmp_path):
    run_on_ranks(save_part, 2, "fsdp", str(tmp_path), lora_config())
    import peft

    torch.manual_seed(0)
    model = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    assert any(tensor.any() for name, tensor in model.state_dict().items() if "lora_B" in name)


class OfNoLibrary(nn.Linear):
    """Has a configuration and a method of a library's name, but none of a library's files."""

    def __init__(self):
        super().__init__(2, 2)
        self.config = {"size": 2}

    def save_pretrained(self, folder):
        raise NotImplementedError(folder)


def test_other_models_are_one_file(tmp_path):
    booster = Booster("cpu")
    for name, model in (("plain", nn.Linear(2, 2)), ("own", OfNoLibrary())):
        booster.save_model(model, tmp_path / name)
        assert_same_tensors(load_file(tmp_path / name), model.state_dict(), EXACT)
    adapted = booster.enable_lora(make_model(), lora_config=lora_config())
    booster.save_model(adapted, tmp_path / "adapted")
    assert (tmp_path / "adapted").is_file(), "`from_pretrained` would leave the adapters out"


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointError, match=r"out' is a file, but this call writes a folder .*out\.safetensors"):
        Booster("cpu").save_model(make_model(), tmp_path / "out")


def save_own_model(run, folder, lora):
    booster, model, optimizer = boost(run, lora=lora)
    own = model.unwrap()
    train(booster, model, optimizer)
    for each in (own, own.get_base_model()) if lora else (own,):
        with pytest.raises(ConfigError, match=r"`save_pretrained` of the model that `boost` returned, on every rank"):
            each.save_pretrained(folder)


@pytest.mark.parametrize(("run", "is_adapted"), [*((run, False) for run in SHARDED), ("gemini", True)])
def test_saving_the_own_model_of_a_sharded_run_raises(run, is_adapted, tmp_path):
    run_on_ranks(save_own_model, 2, run, str(tmp_path), lora_config() if is_adapted else None)
    assert not list(tmp_path.iterdir())


def lora_config():
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def train_and_save_adapters(run, folder, lora):
    torch.manual_seed(1)
    booster, model, optimizer = boost(run, lora=lora)
    train(booster, model, optimizer)
    model.save_pretrained(f"{folder}/pretrained")
    booster.save_lora_as_pretrained(model, f"{folder}/lora")
    with pytest.raises(ConfigError, match="leave `save_peft_format` out"):
        model.save_pretrained(f"{folder}/other", save_peft_format=False)


@matrix(["single"], run=["single", "ddp", "fsdp", "zero1", "gemini", "hybrid-tp"])
def test_adapters_are_saved_as_peft_loads_them(run, tmp_path):
    lora = lora_config()
    import peft

    run_on_ranks(train_and_save_adapters, RUNS[run].num_ranks, run, str(tmp_path), lora)
    ours, theirs = (peft.PeftModel.from_pretrained(make_model(), tmp_path / name) for name in ("pretrained", "lora"))
    assert_same_tensors(ours.state_dict(), theirs.state_dict(), EXACT)
    trained = [value for name, value in ours.state_dict().items() if "lora_B" in name]
    assert trained
    assert all(value.any() for value in trained), "lora_B begins as zeros"


@raises_on_ranks(ConfigError, r"`\w*Saves.save_pretrained` would write what this rank holds.* `booster.save_model", 2)
def test_a_model_of_another_library_does_not_save_a_part_of_itself(tmp_path):
    folder = str(tmp_path)
    model, *_ = Booster(plugin=GeminiPlugin()).boost(Saves(4, 2))
    model.save_pretrained(folder)


class WithMixin(nn.Module, huggingface_hub.PyTorchModelHubMixin):
    """A model that the Hub's mixin saves and loads, with its arguments as configuration."""

    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs):
        return self.layer(inputs)


def make_of_library(library):
    torch.manual_seed(0)
    if library == "huggingface_hub":
        return WithMixin(width=5)
    return get_model("diffusers/unet2d").build()


def save_for_library(library, plugin, folder):
    """Save in each way, and return which of them the library's own ``from_pretrained`` loads otherwise."""
    booster, model = Booster(plugin=plugin), make_of_library(library)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind = type(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = booster.context.coordinator.rank
    booster.save_model(model, f"{folder}/single")
    model.save_pretrained(f"{folder}/own" if plugin != "ddp" else f"{folder}/own-{rank}")
    ways = {"single": {}, "own" if plugin != "ddp" else "own-0": {}}
    if library == "diffusers":
        booster.save_model(model, f"{folder}/numbered", shard=True, size_per_shard=1)
        booster.save_model(model, f"{folder}/ema", shard=True, prefix="ema")
        booster.save_model(model, f"{folder}/bin", use_safetensors=False)
        booster.save_checkpoint(f"{folder}/run", step=1, model=model, optimizer=optimizer)
        ways |= {"numbered": {}, "ema": {"variant": "ema"}, "bin": {"use_safetensors": False}}
        ways["run/step-00000001/model"] = {}
    booster.context.coordinator.block_all()
    for way, options in ways.items():
        loaded = kind.from_pretrained(f"{folder}/{way}", **options)
        assert_same_tensors(loaded.state_dict(), expected, EXACT)
        assert booster.load_model(model, f"{folder}/{way}").is_complete
    if library == "diffusers":
        config = json.loads(Path(f"{folder}/single/config.json").read_text())
        assert config["_class_name"] == kind.__name__


@pytest.mark.parametrize(
    ("library", "plugin"),
    [("diffusers", "ddp"), ("diffusers", "fsdp"), ("huggingface_hub", "zero"), ("huggingface_hub", "gemini")],
)
def test_a_librarys_own_from_pretrained_loads_what_is_written(library, plugin, tmp_path):
    if missing_libraries([library]):
        pytest.skip(f"{library} is not installed, nor in {FOLDER}")
    run_on_ranks(save_for_library, 2, library, plugin, str(tmp_path))
