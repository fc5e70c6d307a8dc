"""Saved here, loaded there: Gemini in its variants, ZeRO, DDP and one process, at one to four ranks."""

import pytest
import torch

from booster_core.plugin.single import SingleDevicePlugin
from booster_ddp import TorchDDPPlugin
from booster_gemini import GeminiPlugin
from booster_testing import peak_memory, run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.conformance_runs import load_and_train, train_and_save
from booster_testing.training import Training
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "gemini x2": (GeminiPlugin, {"min_chunk_bytes": 512}, 2),
    "gemini x3": (GeminiPlugin, {"min_chunk_bytes": 256, "partition": "parameter"}, 3),
    "gemini x1": (GeminiPlugin, {}, 1),
    "replicas x4": (GeminiPlugin, {"replica_size": 2, "min_chunk_bytes": 256}, 4),
    "zero x3": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 3),
    "ddp x2": (TorchDDPPlugin, {}, 2),
    "single": (SingleDevicePlugin, {}, 1),
}
PAIRS = [
    (saved, loaded) for saved in RUNS for loaded in RUNS if any(RUNS[n][0] is GeminiPlugin for n in (saved, loaded))
]


def run(function, name, *args, **changes):
    plugin_class, options, world_size = RUNS[name]
    training = Training(plugin_class=plugin_class, options=options, **changes)
    per_rank = run_on_ranks(function, world_size, training, *args)
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_goes_on_under_another_plugin_and_number_of_ranks(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True)
    assert run(load_and_train, loaded, str(tmp_path)) == pytest.approx(
        expected, rel=tolerance_for(torch.float32).relative
    )


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize(("saved", "loaded"), [("gemini x3", "ddp x2"), ("zero x3", "gemini x2")])
def test_matrix_optimizers_go_on_too(optimizer, saved, loaded, tmp_path):
    # Whole parameters are what these optimizers get, whatever `partition` says of others.
    expected = run(train_and_save, saved, str(tmp_path), False, optimizer=optimizer)
    actual = run(load_and_train, loaded, str(tmp_path), optimizer=optimizer)
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.float32).relative)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("gemini x2", "zero x3"), ("zero x3", "gemini x2"), ("ddp x2", "gemini x3"), ("gemini x2", "single")],
)
def test_masters_win_over_the_rounded_model(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True, precision="bf16")
    actual = run(load_and_train, loaded, str(tmp_path), precision="bf16")
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.bfloat16).relative)


def save_and_measure(folder):
    from booster_core import Booster

    booster = Booster(plugin=GeminiPlugin(min_chunk_bytes=2**20))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 1024)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(maps_files=True) as used:
        booster.save_model(model, f"{folder}/m", shard=True)
        booster.save_optimizer(optimizer, f"{folder}/o", shard=True)
    return used.peak_bytes


def test_saving_gathers_nothing(tmp_path):
    # The whole model has 64 MiB, and a rank's share of model and state 96 MiB.
    assert max(run_on_ranks(save_and_measure, 2, str(tmp_path))) < 24 * 2**20
