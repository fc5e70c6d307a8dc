"""Releases in block FP8 and MXFP4 under every plugin: each rank has its part of what transformers dequantizes."""

import pytest
import torch
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, runs

from booster_core.state import slices_of
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_runtime.lazy import load_pretrained
from booster_testing import run_on_ranks

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


def wrong_shards(booster, model, expected):
    """Return the names of tensors of which this rank has other values, and how many it has any of."""
    shards = [shard for shard in booster.state_adapter(model).model_shards() if shard.numel]
    wrong = []
    for shard in shards:
        part = expected[shard.name][slices_of(shard.box)].reshape(-1)[slice(*shard.flat_range)]
        if not torch.equal(shard.data.reshape(-1), part.to(shard.dtype)):
            wrong.append(shard.name)
    return wrong, len(shards) > 0


def read_each_way(run, family, folder):
    """Load into models with values, into lazy ones and by `from_pretrained` in `LazyInitContext`."""
    found = {}
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
                    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            if way == "load_pretrained":
                load_pretrained(model, folder)
        model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        if way == "load_model":
            booster.load_model(model, folder)
        found[way] = wrong_shards(booster, model, torch.load(f"{folder}/{dtype}.pt"))
        if way == "from_pretrained":
            booster.save_model(model, f"{folder}/written", shard=True)
    return found


CASES = [("qwen3_moe", run) for run in SETTINGS] + [
    ("gpt_oss", run) for run in SETTINGS if run != "tp2"
]  # it has no policy
DEFAULT = ["gpt_oss-fsdp", "qwen3_moe-zero3", "qwen3_moe-gemini", "qwen3_moe-tp2", "gpt_oss-ep2"]


@matrix(DEFAULT, **{"family, run": CASES})
def test_each_rank_reads_its_part(family, run, tmp_path):
    write_release(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        torch.save(read_by_transformers(family, tmp_path, dtype), tmp_path / f"{dtype}.pt")
    for found in run_on_ranks(read_each_way, 2, run, family, str(tmp_path)):
        assert found == dict.fromkeys(found, ([], True))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype="auto")
    assert not hasattr(loaded.config, "quantization_config")
    assert_same(loaded.state_dict(), torch.load(tmp_path / "torch.bfloat16.pt"))
