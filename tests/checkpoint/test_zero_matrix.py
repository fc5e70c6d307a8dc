"""Saved here, loaded there: ZeRO in its variants, DDP and one process, at one to four ranks."""

import pytest
import torch

from booster_core.plugin.single import SingleDevicePlugin
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.conformance_runs import load_and_train, train_and_save
from booster_testing.training import Training
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "zero1 x2": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2 x3": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256, "offload": "disk"}, 3),
    "zero1 x1": (LowLevelZeroPlugin, {"stage": 1, "cpu_offload": True}, 1),
    "whole x2": (LowLevelZeroPlugin, {"stage": 2, "partition": "parameter"}, 2),
    "replicas x4": (LowLevelZeroPlugin, {"stage": 1, "replica_size": 2, "bucket_bytes": 256}, 4),
    "ddp x2": (TorchDDPPlugin, {}, 2),
    "single": (SingleDevicePlugin, {}, 1),
}


def run(function, name, *args, **changes):
    plugin_class, options, world_size = RUNS[name]
    if options.get("offload") == "disk":
        options = {
            **options,
            "offload_dir": args[0],
        }  # its files have no name, so that they are no part of a checkpoint
    training = Training(plugin_class=plugin_class, options=options, **changes)
    per_rank = run_on_ranks(function, world_size, training, *args)
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]


REPLICATED = {"ddp x2", "single"}
PAIRS = [(saved, loaded) for saved in RUNS for loaded in RUNS if not {saved, loaded} <= REPLICATED]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_goes_on_under_another_plugin_and_number_of_ranks(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True)
    assert run(load_and_train, loaded, str(tmp_path)) == pytest.approx(
        expected, rel=tolerance_for(torch.float32).relative
    )


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("zero1 x2", "ddp x2"), ("ddp x2", "zero2 x3"), ("whole x2", "zero1 x1")]
)
def test_matrix_optimizers_go_on_too(optimizer, saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), False, optimizer=optimizer)
    actual = run(load_and_train, loaded, str(tmp_path), optimizer=optimizer)
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.float32).relative)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("zero1 x2", "zero2 x3"), ("zero2 x3", "ddp x2"), ("ddp x2", "zero1 x2"), ("zero1 x2", "single")],
)
def test_masters_win_over_the_rounded_model(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True, precision="bf16")
    actual = run(load_and_train, loaded, str(tmp_path), precision="bf16")
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.bfloat16).relative)


def masters_after_loading(training, folder, model_first):
    """Return whether masters are those that were saved, bit for bit, in whichever order files are read."""
    booster = training.make_booster()
    results = []
    for load in (False, True):
        model = training.make_model()
        if load:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        model, optimizer, *_ = booster.boost(model, training.make_optimizer(model))
        if load:
            calls = [(booster.load_model, model, "m"), (booster.load_optimizer, optimizer, "o")]
            for call, loaded_into, name in calls if model_first else calls[::-1]:
                call(loaded_into, f"{folder}/{name}")
        else:
            tokens = torch.arange(12).view(2, 6)
            booster.backward(model(tokens).square().mean(), optimizer)
            optimizer.step()
            booster.save_model(model, f"{folder}/m", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/o", shard=True)
        shards = booster.state_adapter(model, optimizer).optimizer_shards()
        kept = {shard.name: (shard.flat_range, shard.data.clone()) for shard in shards if shard.state == "master"}
        results.append((kept, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    (masters, saved), (loaded, restored) = results
    assert masters
    # The first run has laid its buckets out by the order of gradients, the second not yet: compare what both hold.
    everyone = DistCoordinator().all_gather_object(loaded)
    for name, ((start, stop), values) in masters.items():
        whole = {}
        for of_rank in everyone:
            if name in of_rank:
                (first, _), data = of_rank[name]
                whole.update({first + i: float(value) for i, value in enumerate(data.flatten())})
        assert [whole[i] for i in range(start, stop)] == [float(value) for value in values.flatten()], name
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_come_back_bit_for_bit_in_either_order(model_first, tmp_path):
    training = Training(
        plugin_class=LowLevelZeroPlugin, options={"stage": 2, "bucket_bytes": 256}, precision="bf16", unused=False
    )
    run_on_ranks(masters_after_loading, 2, training, str(tmp_path), model_first)
