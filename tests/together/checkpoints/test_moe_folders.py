"""Folders of mixtures of experts, read and written by sharded models."""

import pytest
import torch

from booster_core import Booster, discovery
from booster_core.ranks import DistCoordinator
from booster_core.state import slices_of

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from expert_folders import assert_same, build, llama, mixtral, tensors_in, transposed_files  # noqa: E402
from plugin_runs import RUNS, boosted  # noqa: E402
from ranked import on_ranks  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


@pytest.mark.parametrize("name", ["zero1", "fsdp", "gemini", "hybrid-tp"])
@on_ranks(2)
def test_sharded_models_read_and_write_what_transformers_does(name, tmp_path):
    if DistCoordinator().is_master():
        build(mixtral).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    DistCoordinator().block_all()
    booster, model, _ = boosted(RUNS[name], build(mixtral, seed=1))
    booster.load_model(model, tmp_path / "theirs")
    booster.save_model(model, tmp_path / "ours", shard=True)
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


@on_ranks(2)
def test_sharded_models_hold_parts_of_tensors_that_files_hold_transposed(tmp_path):
    """Each of two ranks holds rows of a matrix, or a flat range of it."""
    with transposed_files():
        build(llama).save_pretrained(tmp_path / f"theirs-{DistCoordinator().rank}")  # transformers writes on rank 0
    for plugin in ("gemini", "fsdp"):
        with transposed_files():
            booster = Booster("cpu", None, discovery.load(plugin)())
            model, other = build(llama), build(llama, seed=1)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
            booster.save_model(model, tmp_path / plugin, shard=True)
            found, theirs = tensors_in(tmp_path / plugin), tensors_in(tmp_path / "theirs-0")
            assert [key for key in theirs if not torch.equal(found[key], theirs[key])] == [], plugin
            other, *_ = booster.boost(other, torch.optim.AdamW(other.parameters()))
            booster.load_model(other, tmp_path / plugin)
            for shard in booster.state_adapter(other).model_shards():
                part = expected[shard.name][slices_of(shard.box)].reshape(-1)[slice(*shard.flat_range)]
                assert torch.equal(shard.data.reshape(-1), part), f"{plugin} loads {shard.name}"
