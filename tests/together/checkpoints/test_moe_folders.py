"""Folders of mixtures of experts, read and written by sharded models."""

from pathlib import Path

import pytest
import torch

from booster_core import Booster, discovery
from booster_core.state import slices_of
from booster_testing import run_on_ranks

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from expert_folders import assert_same, build, llama, mixtral, tensors_in, transposed_files  # noqa: E402
from plugin_runs import RUNS, boosted  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


def boosted_folder(name, source, target):
    """Load a folder into a boosted model, change it, and save it."""
    booster, model, _ = boosted(RUNS[name], build(mixtral, seed=1))
    booster.load_model(model, source)
    booster.save_model(model, target, shard=True)


@pytest.mark.parametrize("name", ["zero1", "fsdp", "gemini", "hybrid-tp"])
def test_sharded_models_read_and_write_what_transformers_does(name, tmp_path):
    build(mixtral).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    run_on_ranks(boosted_folder, 2, name, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


def test_sharded_models_hold_parts_of_tensors_that_files_hold_transposed(tmp_path):
    """Each of two ranks holds rows of a matrix, or a flat range of it."""
    with transposed_files():
        build(llama).save_pretrained(tmp_path / "theirs")
    assert run_on_ranks(transposed_parts, 2, str(tmp_path)) == [[], []]


def transposed_parts(folder):
    """Return what differs where boosted models save and load such files."""
    wrong = []
    for plugin in ("gemini", "fsdp"):
        with transposed_files():
            booster = Booster("cpu", None, discovery.load(plugin)())
            model, other = build(llama), build(llama, seed=1)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
            booster.save_model(model, f"{folder}/{plugin}", shard=True)
            found, theirs = tensors_in(Path(folder) / plugin), tensors_in(Path(folder) / "theirs")
            wrong += [f"{plugin} saves {key}" for key in theirs if not torch.equal(found[key], theirs[key])]
            other, *_ = booster.boost(other, torch.optim.AdamW(other.parameters()))
            booster.load_model(other, f"{folder}/{plugin}")
            for shard in booster.state_adapter(other).model_shards():
                part = expected[shard.name][slices_of(shard.box)].reshape(-1)[slice(*shard.flat_range)]
                wrong += [] if torch.equal(shard.data.reshape(-1), part) else [f"{plugin} loads {shard.name}"]
    return wrong
