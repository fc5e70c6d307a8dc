"""``save_pretrained`` of one process and of replicas: stock ``from_pretrained`` loads it, or an error says why."""

import json

import pytest
import torch
from adapted_models import Replicas
from pretrained_models import Saves, load, make_model, tokens, trained_in_one_process
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.checkpoint_io import mebibytes
from booster_core.errors import ConfigError, MissingRanksError
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


def boost(plugin=None, lora=None):
    booster, model = Booster(plugin=plugin), make_model()
    if lora is not None:
        model = booster.enable_lora(model, lora_config=lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return booster, *booster.boost(model, optimizer)[:2]


def train(booster, model, optimizer):
    """Take a step; every rank sees the same batch, so that the run equals one process'."""
    booster.backward(model(input_ids=tokens(), labels=tokens()).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def train_and_save(folder):
    booster, model, optimizer = boost(Replicas())
    train(booster, model, optimizer)
    model.save_pretrained(folder)


def test_from_pretrained_loads_what_replicas_trained(tmp_path):
    run_on_ranks(train_and_save, 2, str(tmp_path / "ours"))
    expected = trained_in_one_process()
    loaded = load(tmp_path / "ours")
    assert_same_tensors(loaded.state_dict(), expected.state_dict(), tolerance_for(torch.float32))
    assert not torch.equal(loaded.lm_head.weight, make_model().lm_head.weight), "the step is in it"
    expected.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / who / name).read_text()) for who in ("ours", "theirs"))
        assert ours == theirs, name


def test_options_of_transformers_are_followed(tmp_path):
    booster, model, optimizer = boost()
    train(booster, model, optimizer)
    options = {"is_main_process": True, "variant": "ema", "safe_serialization": False, "max_shard_size": "2MB"}
    model.save_pretrained(tmp_path, **options)
    assert list(tmp_path.glob("pytorch_model.ema*.bin"))
    assert not list(tmp_path.glob("*.safetensors"))
    loaded = load(tmp_path, variant="ema", use_safetensors=False)
    assert_same_tensors(loaded.state_dict(), trained_in_one_process().state_dict(), EXACT)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"state_dict": {}}, ConfigError, "leave `state_dict` out"),
        ({"push_to_hub": True}, ConfigError, r"`push_to_hub=True` .*upload_folder"),
        ({"max_shard_size": "10KB"}, ConfigError, "below 1 MiB"),
        ({"max_shard_size": "many"}, ConfigError, r"`max_shard_size='many'` is not a size"),
        ({"is_main_process": False}, ConfigError, "`is_main_process=False` on rank 0"),
        ({"save_original_format": False}, ConfigError, "can't be followed"),
        ({"shard_size": 3}, TypeError, "unexpected keyword argument 'shard_size'"),
    ],
)
def test_what_cannot_be_followed_raises(options, error, match):
    _, model, _ = boost()
    with pytest.raises(error, match=match):
        model.save_pretrained("never", **options)


def test_a_large_maximum_size_is_whole_mebibytes():
    assert [mebibytes(size) for size in ("5GB", "1GiB", "3.5MiB", 2**21, "200MB")] == [4768, 1024, 3, 2, 190]


@on_ranks(2, group_timeout_seconds=2)
def test_saving_on_rank_0_alone_names_who_is_missing(tmp_path):
    folder = str(tmp_path)
    _, model, _ = boost(Replicas())
    if torch.distributed.get_rank() == 0:
        with pytest.raises(MissingRanksError, match=r"`save_pretrained`.*rank 1"):
            model.save_pretrained(folder)


def lora_config():
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def save_own_model(folder, lora):
    """The adapter of a plugin may show more than what the model holds, as that of `ReferencePlugin` does."""
    _, model, _ = boost(Replicas(), lora)
    own = model.unwrap()
    for each in (own, own.get_base_model()) if lora else (own,):
        with pytest.raises(ConfigError, match=r"`save_pretrained` of the model that `boost` returned, on every rank"):
            each.save_pretrained(folder)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_saving_the_own_model_of_another_adapter_raises(is_adapted, tmp_path):
    run_on_ranks(save_own_model, 2, str(tmp_path), lora_config() if is_adapted else None)
    assert not list(tmp_path.iterdir())


def test_adapters_are_saved_as_peft_loads_them(tmp_path):
    torch.manual_seed(1)
    booster, model, optimizer = boost(lora=lora_config())
    import peft

    train(booster, model, optimizer)
    model.save_pretrained(tmp_path / "pretrained")
    booster.save_lora_as_pretrained(model, tmp_path / "lora")
    ours, theirs = (peft.PeftModel.from_pretrained(make_model(), tmp_path / name) for name in ("pretrained", "lora"))
    assert_same_tensors(ours.state_dict(), theirs.state_dict(), EXACT)
    trained = [value for name, value in ours.state_dict().items() if "lora_B" in name]
    assert trained
    assert all(value.any() for value in trained), "lora_B begins as zeros"
    with pytest.raises(ConfigError, match="leave `save_peft_format` out"):
        model.save_pretrained(tmp_path / "other", save_peft_format=False)


def save_other(folder):
    model, *_ = Booster(plugin=Replicas()).boost(Saves(4, 2))
    model.save_pretrained(folder)


def test_a_model_of_another_library_saves_itself_where_it_is_whole(tmp_path):
    model, *_ = Booster().boost(Saves(4, 2))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "own.pt").exists()
    match = r"`\w*Saves.save_pretrained` would write what this rank holds.* `booster.save_model"
    expect_on_ranks(ConfigError, match, save_other, 2, str(tmp_path))


def test_a_model_without_save_pretrained_has_none():
    model, *_ = Booster().boost(nn.Linear(2, 1))
    assert not hasattr(model, "save_pretrained")
