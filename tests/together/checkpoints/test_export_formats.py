"""A model is exported in one format under every plugin: that in which it came, or that which was asked for."""

import json
from dataclasses import replace

import pytest
import torch
from matrix import matrix
from plugin_runs import RUNS, boosted, step
from ranked import on_ranks
from safetensors.torch import load_file

from booster_core import PrecisionPolicy
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

F32, BF16 = torch.float32, torch.bfloat16
CASES = {  # what the model comes in, what is asked, what is written
    "fp32 model": (F32, None, F32),
    "fp32 model, bf16 asked": (F32, "bf16", F32),
    "fp32 model, fp16 asked": (F32, "fp16", F32),
    "bf16 model": (BF16, None, BF16),
    "bf16 model, bf16 asked": (BF16, "bf16", BF16),
    "bf16 model, fp32 asked": (BF16, "fp32", F32),
    "bf16 files asked": (F32, PrecisionPolicy(compute_dtype=BF16, save_dtype=BF16), BF16),
    "fp32 files asked": (BF16, PrecisionPolicy(compute_dtype=BF16, save_dtype=F32), F32),
}


TOKENS = torch.arange(24).view(4, 6) % 16
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def make_model(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_llama()
        with torch.no_grad():
            for parameter in model.parameters():  # norms as well have digits that bf16 lacks
                parameter.add_(torch.randn_like(parameter) * 0.01)
    return model.to(dtype)


def boost(run, dtype, precision):
    return boosted(replace(RUNS[run], precision=precision), make_model(dtype), lr=0.5)


def save_all(run, root):
    for case, (dtype, precision, _) in CASES.items():
        booster, model, optimizer = boost(run, dtype, precision)
        booster.save_model(model, f"{root}/{case}/at first", shard=True)
        step(booster, model, optimizer, BATCH)
        booster.save_model(model, f"{root}/{case}/trained", shard=True)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    root = tmp_path_factory.mktemp("single")
    run_on_ranks(save_all, 1, "single", str(root))
    return root


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@matrix(["fsdp", "zero2", "gemini", "hybrid-tp"], run=RUNS)
def test_every_plugin_writes_the_same_format(run, tmp_path, one_process):
    run_on_ranks(save_all, RUNS[run].num_ranks, run, str(tmp_path))
    for case, (came_in, _, written) in CASES.items():
        at_first = files(tmp_path / case / "at first")
        assert at_first == files(one_process / case / "at first"), f"{case}: unchanged values, bit for bit"
        trained = files(tmp_path / case / "trained")
        assert json.loads(trained["config.json"])["dtype"] == str(written).removeprefix("torch."), case
        ours, expected = (
            load_file(root / case / "trained" / "model-00001-of-00001.safetensors") for root in (tmp_path, one_process)
        )
        assert {tensor.dtype for tensor in ours.values()} == {written}, case
        assert_same_tensors(ours, expected, tolerance_for(BF16))
        sizes = {name: len(content) for name, content in trained.items()}
        assert sizes == {name: len(content) for name, content in files(one_process / case / "trained").items()}, case
        if written == came_in == F32:
            weight = ours["lm_head.weight"]
            assert not torch.equal(weight, weight.to(BF16).to(F32)), f"{case}: what the optimizer updates, not rounded"
        first = load_file(tmp_path / case / "at first" / "model-00001-of-00001.safetensors")
        assert_same_tensors(first, make_model(came_in).to(written).state_dict(), EXACT)


@pytest.mark.parametrize("run", ["single", "ddp", "zero1", "zero2", "hybrid-dp", "hybrid-tp"])
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_what_the_script_has_written_since_the_last_step_is_exported(run, tmp_path):
    booster, model, optimizer = boost(run, F32, "bf16")
    step(booster, model, optimizer, BATCH)
    with torch.no_grad():
        model.unwrap().model.norm.weight[3] = 0.625
    booster.save_model(model, tmp_path / "model.safetensors")
    weight = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert weight[3] == 0.625
    assert not torch.equal(weight, weight.to(BF16).to(F32)), "all else is what the optimizer updates"


@pytest.mark.parametrize("run", ["single", "ddp", "fsdp", "zero1", "gemini", "hybrid-tp"])
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_a_model_without_an_optimizer_has_the_same_format(run, tmp_path):
    booster = replace(RUNS[run], precision="bf16").make_booster()
    model, *_ = booster.boost(make_model(F32))
    booster.save_model(model, tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {F32}
