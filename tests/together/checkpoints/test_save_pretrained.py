"""``save_pretrained`` under every plugin: stock ``from_pretrained`` loads what was trained, or an error says why."""

import json
from importlib.util import find_spec

import pytest
import torch
from cases import Setting
from isolated_libraries import FOLDER, missing_libraries
from matrix import matrix
from model_zoo import get_model
from plugin_runs import runs, step
from pretrained_models import Saves, load, make_model, tokens, trained_in_one_process
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import load_file
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_gemini import GeminiPlugin
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
needs_peft = pytest.mark.skipif(
    find_spec("peft") is None, reason="adapters need peft: pip install 'booster-runtime[lora]'"
)


def lora_config():
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def num_ranks_of(run):
    return RUNS[run].num_ranks


def boost(run, lora=None):
    booster, model = RUNS[run].make_booster(), make_model()
    if lora is not None:
        model = booster.enable_lora(model, lora_config=lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return booster, *booster.boost(model, optimizer)[:2]


def train(booster, model, optimizer):
    """Take a step; every rank sees the same batch, so that the run equals one process'."""
    step(booster, model, optimizer, {"input_ids": tokens(), "labels": tokens()})


@pytest.mark.parametrize("run", RUNS)
@on_ranks(num_ranks_of)
def test_from_pretrained_loads_what_save_pretrained_and_save_model_write_by_default(run, tmp_path):
    """The path of `save_model` has no suffix of a file, though it has a dot; one that has stays a file."""
    booster, model, optimizer = boost(run)
    train(booster, model, optimizer)
    expected, folder, ours = trained_in_one_process(), tmp_path / "Tiny-0.5-Base", tmp_path / "ours"
    if booster.context.coordinator.is_master():
        expected.save_pretrained(tmp_path / "theirs")
        if run not in SHARDED:
            model.unwrap().save_pretrained(tmp_path / "own")
    model.save_pretrained(ours)
    booster.save_model(model, folder)
    saved = load(folder).state_dict()
    train(booster, model, optimizer)
    assert booster.load_model(model, folder).is_complete
    booster.save_model(model, tmp_path / "again.safetensors")
    assert_same_tensors(load_file(tmp_path / "again.safetensors"), saved, EXACT)
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    for loaded in map(load, (folder, ours, *([] if run in SHARDED else [tmp_path / "own"]))):
        assert_same_tensors(loaded.state_dict(), expected.state_dict(), tolerance_for(torch.float32))
        assert not torch.equal(loaded.lm_head.weight, make_model().lm_head.weight), "the step is in it"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text()), name
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


def step_with_value(booster, model, optimizer):
    booster.backward(model(input_ids=tokens(), labels=tokens()), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("hybrid")])
@on_ranks(num_ranks_of)
def test_a_part_is_written_and_read_like_a_model(run, tmp_path):
    booster = RUNS[run].make_booster()
    boosted, optimizer, *_ = booster.boost(*make_with_value(make_model()))
    step_with_value(booster, boosted, optimizer)
    booster.save_model(boosted.policy, tmp_path)
    booster.save_model(boosted.policy.model, tmp_path / "body.safetensors")
    step_with_value(booster, boosted, optimizer)
    assert booster.load_model(boosted.policy, tmp_path).is_complete
    if run in SHARDED:
        with pytest.raises(ConfigError, match=r"Call `booster.save_model\(part, folder\)` with this module as `part`"):
            boosted.policy.save_pretrained(tmp_path / "native")
    else:
        boosted.policy.save_pretrained(tmp_path / f"native-{booster.context.coordinator.rank}")
    booster.save_model(boosted.policy, tmp_path / "again.safetensors")
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


@needs_peft
@on_ranks(2)
def test_adapters_of_a_part_are_written_as_those_of_a_model(tmp_path):
    import peft

    booster = RUNS["fsdp"].make_booster()
    policy = booster.enable_lora(make_model(), lora_config=lora_config())
    boosted, optimizer, *_ = booster.boost(*make_with_value(policy))
    step_with_value(booster, boosted, optimizer)
    booster.save_lora_as_pretrained(boosted.policy, tmp_path)
    torch.manual_seed(0)
    model = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    assert any(tensor.any() for name, tensor in model.state_dict().items() if "lora_B" in name)


@needs_peft
def test_other_models_are_one_file(tmp_path):
    """One has a configuration and a method of a library's name, but none of a library's files."""
    booster, of_no_library = Booster("cpu"), Saves(2, 2)
    of_no_library.config = {"size": 2}
    for name, model in (("plain", nn.Linear(2, 2)), ("own", of_no_library)):
        booster.save_model(model, tmp_path / name)
        assert_same_tensors(load_file(tmp_path / name), model.state_dict(), EXACT)
    adapted = booster.enable_lora(make_model(), lora_config=lora_config())
    booster.save_model(adapted, tmp_path / "adapted")
    assert (tmp_path / "adapted").is_file(), "`from_pretrained` would leave the adapters out"


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointError, match=r"out' is a file, but this call writes a folder .*out\.safetensors"):
        Booster("cpu").save_model(make_model(), tmp_path / "out")


@pytest.mark.parametrize(
    ("run", "is_adapted"), [*((run, False) for run in SHARDED), pytest.param("gemini", True, marks=needs_peft)]
)
@on_ranks(2)
def test_saving_the_own_model_of_a_sharded_run_raises(run, is_adapted, tmp_path):
    booster, model, optimizer = boost(run, lora=lora_config() if is_adapted else None)
    own = model.unwrap()
    train(booster, model, optimizer)
    for each in (own, own.get_base_model()) if is_adapted else (own,):
        with pytest.raises(ConfigError, match=r"`save_pretrained` of the model that `boost` returned, on every rank"):
            each.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@needs_peft
@matrix(["single"], run=["single", "ddp", "fsdp", "zero1", "gemini", "hybrid-tp"])
@on_ranks(num_ranks_of)
def test_adapters_are_saved_as_peft_loads_them(run, tmp_path):
    import peft

    torch.manual_seed(1)
    booster, model, optimizer = boost(run, lora=lora_config())
    train(booster, model, optimizer)
    model.save_pretrained(tmp_path / "pretrained")
    booster.save_lora_as_pretrained(model, tmp_path / "lora")
    with pytest.raises(ConfigError, match="leave `save_peft_format` out"):
        model.save_pretrained(tmp_path / "other", save_peft_format=False)
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


of_diffusers = pytest.mark.skipif(
    bool(missing_libraries(["diffusers"])), reason=f"diffusers is not installed, nor in {FOLDER}"
)


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        *(pytest.param("diffusers", plugin, marks=of_diffusers) for plugin in ("ddp", "fsdp")),
        *(("huggingface_hub", plugin) for plugin in ("zero", "gemini")),
    ],
)
@on_ranks(2)
def test_a_librarys_own_from_pretrained_loads_what_is_written(library, plugin, tmp_path):
    torch.manual_seed(0)
    model = WithMixin(width=5) if library == "huggingface_hub" else get_model("diffusers/unet2d").build()
    booster = Booster(plugin=plugin)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind = type(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(model, tmp_path / "single")
    model.save_pretrained(tmp_path / (f"own-{booster.context.coordinator.rank}" if plugin == "ddp" else "own"))
    ways = {"single": {}, "own-0" if plugin == "ddp" else "own": {}}
    if library == "diffusers":
        booster.save_model(model, tmp_path / "numbered", shard=True, size_per_shard=1)
        booster.save_model(model, tmp_path / "ema", shard=True, prefix="ema")
        booster.save_model(model, tmp_path / "bin", use_safetensors=False)
        booster.save_checkpoint(tmp_path / "run", step=1, model=model, optimizer=optimizer)
        ways |= {"numbered": {}, "ema": {"variant": "ema"}, "bin": {"use_safetensors": False}}
        ways["run/step-00000001/model"] = {}
    booster.context.coordinator.block_all()
    for way, options in ways.items():
        loaded = kind.from_pretrained(tmp_path / way, **options)
        assert_same_tensors(loaded.state_dict(), expected, EXACT)
        assert booster.load_model(model, tmp_path / way).is_complete
    if library == "diffusers":
        assert json.loads((tmp_path / "single" / "config.json").read_text())["_class_name"] == kind.__name__
