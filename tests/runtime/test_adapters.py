"""Adapters in one process and on replicas: gradients, files, and what is refused."""

import sys

import pytest
import torch
from adapted_models import perturbed
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import Capability
from booster_runtime.lora import check_quantization
from booster_runtime.single import SingleDeviceStrategy
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import TinyMLP, tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

CONFIG = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
MAX_SAMPLES = 12


def make_model(**changes):
    torch.manual_seed(3)
    return tiny_llama(**changes)


def make_config(**changes):
    return peft.LoraConfig(**{**CONFIG, **changes})


def tokens_of(step):
    return torch.randint(64, (MAX_SAMPLES, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def boost(plugin=None, *, folder=None, **config):
    booster, model = Booster("cpu", plugin=plugin), make_model()
    if folder is None:
        model = perturbed(booster.enable_lora(model, lora_config=make_config(**config)))
    else:
        model = booster.enable_lora(model, pretrained_dir=folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # the frozen base too, as most scripts do
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def train(booster, model, optimizer, steps):
    for step in steps:
        booster.backward(loss_of(model, tokens_of(step)), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_training_goes_on_from_a_folder(tmp_path):
    booster, model, optimizer = boost()
    train(booster, model, optimizer, range(2))
    booster.save_lora_as_pretrained(model, tmp_path)
    again, loaded, other = boost(folder=tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}
    assert_same_tensors(before, {name: parameter.detach() for name, parameter in model.named_parameters()}, EXACT)
    train(again, loaded, other, range(2, 3))
    changed = {name for name, parameter in loaded.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def resized(folder):
    """Return a model that came from files, with tokens that these lack."""
    make_model().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(71, mean_resizing=False)
    return model


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`", "ignore:Could not identify embedding")
@pytest.mark.parametrize("options", [{}, {"save_embedding_layers": False}, {"save_embedding_layers": True}], ids=repr)
@pytest.mark.parametrize(
    ("is_resized", "config"),
    [
        (False, {"modules_to_save": ["lm_head"]}),
        (False, {"target_modules": ["q_proj", "embed_tokens"]}),
        (True, {}),
        (True, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        (True, {"trainable_token_indices": {"embed_tokens": [1, 5]}}),
    ],
    ids=str,
)
def test_what_is_written_equals_what_peft_writes(is_resized, config, options, tmp_path):
    booster, model = Booster("cpu"), resized(tmp_path / "base") if is_resized else make_model()
    model = perturbed(booster.enable_lora(model, lora_config=make_config(**config)))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(booster, model, optimizer, range(1))
    booster.save_lora_as_pretrained(model, tmp_path / "ours", **options)
    model.unwrap().save_pretrained(tmp_path / "theirs", **options)
    ours, theirs = (
        peft.utils.save_and_load.load_peft_weights(str(tmp_path / who), device="cpu") for who in ("ours", "theirs")
    )
    assert_same_tensors(ours, theirs, EXACT)
    texts = [(tmp_path / who / "adapter_config.json").read_text() for who in ("ours", "theirs")]
    assert texts[0] == texts[1]


def test_several_adapters_are_written_by_name(tmp_path):
    booster = Booster("cpu")
    model = booster.enable_lora(make_model(), lora_config=make_config())
    model.add_adapter("second", make_config(r=2))
    perturbed(model)
    boosted, *_ = booster.boost(model)
    booster.save_lora_as_pretrained(boosted, tmp_path / "all")
    booster.save_lora_as_pretrained(boosted, tmp_path / "one", selected_adapters=["second"])
    with pytest.raises(ConfigError, match=r"no adapters \['third'\]. It has: 'default', 'second'"):
        booster.save_lora_as_pretrained(boosted, tmp_path / "none", selected_adapters=["third"])
    assert not (tmp_path / "one" / "adapter_config.json").exists()
    model.set_adapter("second")
    with torch.no_grad():
        expected = model(input_ids=tokens_of(1)).logits
    for folder in ("all", "one"):
        loaded = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / folder / "second"))
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=tokens_of(1)).logits, expected)


def test_a_plain_model_loads_under_adapters(tmp_path):
    booster = Booster("cpu")
    booster.save_model(make_model(), tmp_path / "base", shard=True)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    boosted, *_ = booster.boost(booster.enable_lora(model, lora_config=make_config()))
    report = booster.load_model(boosted, tmp_path / "base", strict=False)
    assert all("lora_" in name for name in report.missing)
    with torch.no_grad():
        assert torch.equal(boosted(input_ids=tokens_of(0)).logits, make_model()(input_ids=tokens_of(0)).logits)


# ---- what a user can get wrong


def test_an_optimizer_made_before_is_refused():
    booster = Booster("cpu")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = booster.enable_lora(model, lora_config=make_config(modules_to_save=["lm_head"]))
    with pytest.raises(ConfigError, match=r"made before `enable_lora`\. Make it afterwards"):
        booster.boost(model, optimizer)


def test_frozen_parameters_leave_the_optimizer_with_their_names():
    booster = Booster("cpu")
    model = booster.enable_lora(make_model(), lora_config=make_config())
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    booster.boost(model, optimizer)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(group["param_names"]) == 8
    assert all("lora_" in name for name in group["param_names"])


def enable(booster, model, **config):
    return booster.enable_lora(model, lora_config=make_config(**config))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, when it is first imported
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda booster, _: enable(booster, enable(booster, make_model())), ConfigError, "has adapters already"),
        (
            lambda booster, _: enable(booster, booster.boost(make_model()).model),
            ConfigError,
            r"already boosted\. Call `enable_lora` before `boost`",
        ),
        (lambda booster, _: enable(booster, torch.compile(make_model())), ConfigError, r"before `torch\.compile`"),
        (
            lambda booster, _: booster.enable_lora(TinyMLP(), lora_config=peft.LoraConfig()),
            ConfigError,
            r"specify `target_modules`.*Linear layers of `TinyMLP`: first, second",
        ),
        (lambda booster, _: booster.enable_lora(make_model()), ConfigError, "got neither of them"),
        (
            lambda booster, folder: booster.enable_lora(make_model(), pretrained_dir=folder, lora_config=CONFIG),
            ConfigError,
            "got both of them",
        ),
        (
            lambda booster, folder: booster.enable_lora(make_model(), pretrained_dir=folder),
            CheckpointError,
            r"holds no 'adapter_config.json'",
        ),
        (
            lambda booster, folder: booster.save_lora_as_pretrained(booster.boost(nn.Linear(2, 2)).model, folder),
            ConfigError,
            "has no adapters to save",
        ),
    ],
)
def test_what_no_adapters_can_be_made_or_saved_of_is_refused(call, error, match, tmp_path):
    with pytest.raises(error, match=match):
        call(Booster("cpu"), tmp_path)


def test_unknown_target_modules_are_refused_with_the_layers_there_are():
    booster, model = Booster("cpu"), make_model()
    with pytest.raises(ConfigError, match=r"'query'.*not found.*Linear layers of `LlamaForCausalLM`: .*q_proj.*v_proj"):
        enable(booster, model, target_modules=["query"])
    enable(booster, model)  # nothing is left of the attempt


def test_adapters_of_another_model_are_refused(tmp_path):
    booster, model, _ = boost()
    booster.save_lora_as_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)do not fit `LlamaForCausalLM`: .*size mismatch"):
        booster.enable_lora(make_model(hidden_size=64), pretrained_dir=tmp_path)


def test_a_base_is_not_quantised_on_every_device():
    with pytest.raises(ConfigError, match="on CUDA and the CPU, and this run's device is 'mps'"):
        check_quantization(None, torch.device("mps"))


class WithoutAdapters(SingleDeviceStrategy):
    capabilities = SingleDeviceStrategy.capabilities - {Capability.LORA}


def test_a_plugin_that_does_not_declare_adapters_refuses_them():
    booster = Booster("cpu", plugin=WithoutAdapters())
    with pytest.raises(ConfigError, match="does not train adapters"):
        booster.enable_lora(make_model(), lora_config=make_config())
    with pytest.raises(ConfigError, match="does not train adapters"):
        booster.boost(peft.get_peft_model(make_model(), make_config()))


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'booster-runtime\[lora\]'"):
        Booster("cpu").enable_lora(make_model(), lora_config=object())
