"""Releases in block FP8 and MXFP4 under every plugin: each rank has its part of what transformers dequantizes."""

import pytest
import torch
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import on_ranks

from booster_core.ranks import DistCoordinator
from booster_core.state import slices_of
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_runtime.lazy import load_pretrained

transformers = pytest.importorskip("transformers", "5.20", reason="earlier ones dequantize less")
pytest.importorskip("accelerate", reason="transformers reads FP8 with it")

from expert_folders import assert_same  # noqa: E402
from quantized_folders import build, read_by_transformers, write_release  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]

SETTINGS = {
    **runs("ddp", "fsdp", "zero1", "zero2", "zero3", "gemini"),
    "tp2": RUNS["hybrid-tp"],
    "pp2": RUNS["hybrid-pp"],
    "ep2": Setting(HybridParallelPlugin, {"ep_size": 2, "zero_stage": 1}),
}


CASES = [("qwen3_moe", run) for run in SETTINGS] + [
    ("gpt_oss", run) for run in SETTINGS if run != "tp2"
]  # it has no policy
DEFAULT = ["gpt_oss-fsdp", "qwen3_moe-zero3", "qwen3_moe-gemini", "qwen3_moe-tp2", "gpt_oss-ep2"]


@matrix(DEFAULT, **{"family, run": CASES})
@on_ranks(2)
def test_each_rank_reads_its_part(family, run, tmp_path):
    """Load into models with values, into lazy ones and by `from_pretrained` in `LazyInitContext`."""
    coordinator = DistCoordinator()
    if coordinator.is_master():
        write_release(family, tmp_path)
    coordinator.block_all()
    for way in ("load_model", "load_pretrained", "from_pretrained"):
        booster = SETTINGS[run].make_booster()
        dtype = torch.float32 if way == "load_model" else torch.bfloat16
        if way == "load_model":
            model = build(family, seed=3, dtype=dtype)
        else:
            with LazyInitContext():
                if way == "load_pretrained":
                    model = build(family)
                else:
                    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
            if way == "load_pretrained":
                load_pretrained(model, tmp_path)
        model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        if way == "load_model":
            booster.load_model(model, tmp_path)
        expected = read_by_transformers(family, tmp_path, dtype)
        shards = [shard for shard in booster.state_adapter(model).model_shards() if shard.numel]
        assert shards
        for shard in shards:
            part = expected[shard.name][slices_of(shard.box)].reshape(-1)[slice(*shard.flat_range)]
            assert torch.equal(shard.data.reshape(-1), part.to(shard.dtype)), (way, shard.name)
    booster.save_model(model, tmp_path / "written", shard=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype="auto")
    assert not hasattr(loaded.config, "quantization_config")
    assert_same(loaded.state_dict(), expected)
