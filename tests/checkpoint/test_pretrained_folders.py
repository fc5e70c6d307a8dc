"""``save_pretrained`` follows options of transformers, or says why it can't; what it writes is in ``together``."""

import pytest
import torch
from adapted_models import Replicas
from pretrained_models import Saves, load, make_model, tokens, trained_in_one_process
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.checkpoint_io import mebibytes
from booster_core.errors import ConfigError, MissingRanksError
from booster_testing.compare import EXACT, assert_same_tensors

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


def boost(plugin=None):
    booster, model = Booster(plugin=plugin), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return booster, *booster.boost(model, optimizer)[:2]


def test_options_of_transformers_are_followed(tmp_path):
    booster, model, optimizer = boost()
    booster.backward(model(input_ids=tokens(), labels=tokens()).loss, optimizer)
    optimizer.step()
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


def test_a_model_of_another_library_saves_itself_and_others_do_not(tmp_path):
    model, *_ = Booster().boost(Saves(4, 2))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "own.pt").exists()
    model, *_ = Booster().boost(nn.Linear(2, 1))
    assert not hasattr(model, "save_pretrained")
