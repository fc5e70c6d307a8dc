"""Lazy models go straight into chunks, wherever those are: the same bits as eager ones, and memory for one chunk."""

import pytest
import torch

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_runtime.lazy import LazyInitContext, load_pretrained
from booster_testing import run_on_ranks
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama

DISK = {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}
SETTINGS = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


def boost_from_folder(folder, options):
    """Return the peak while a model goes from a folder into chunks, and what it keeps."""
    with peak_memory() as memory:
        with LazyInitContext():
            model = tiny_llama(**SETTINGS)
        load_pretrained(model, folder)
        plugin = GeminiPlugin(min_chunk_bytes=2**20, **options)
        booster = Booster(plugin=plugin)
        boosted, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    from safetensors.torch import load_file

    expected = load_file(f"{folder}/model.safetensors")
    for shard in booster.state_adapter(boosted).model_shards():
        part = expected[shard.name]
        if shard.flat is not None:
            part = part.flatten()[slice(*shard.flat)]
        assert torch.equal(shard.data, part), shard.name
    DistCoordinator().block_all(name="everybody has read", timeout_seconds=30)
    return memory.peak_bytes


@pytest.mark.parametrize(("options", "most"), [({}, 1.3), (DISK, 0.6)], ids=["here", "disk"])
def test_a_folder_goes_into_chunks_without_being_held_whole(options, most, tmp_path):
    written = tiny_llama(**SETTINGS)
    written.save_pretrained(tmp_path / "model")
    total = sum(parameter.nbytes for parameter in written.parameters())
    (tmp_path / "chunks").mkdir()
    options = {**options, "offload_dir": str(tmp_path / "chunks")} if options else {}
    run_on_ranks(boost_from_folder, 2, str(tmp_path / "model"), options)  # what is imported on the way
    peaks = run_on_ranks(boost_from_folder, 2, str(tmp_path / "model"), options)
    assert sum(peaks) <= most * total, [peak / 2**20 for peak in peaks]
