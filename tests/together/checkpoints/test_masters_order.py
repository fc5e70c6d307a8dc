"""Masters are loaded bit for bit, whether the model's file is read first or the optimizer's."""

import pytest
import torch

from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import run_on_ranks
from booster_testing.training import Training
from booster_zero import LowLevelZeroPlugin


def masters_after_loading(training, folder, model_first):
    """Check that masters are those that were saved, bit for bit."""
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
    # The first run has ordered its buckets by the arrival of gradients, the second one not yet, so compare by element.
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
def test_masters_load_exactly_in_either_order(model_first, tmp_path):
    training = Training(
        plugin_class=LowLevelZeroPlugin, options={"stage": 2, "bucket_bytes": 256}, precision="bf16", unused=False
    )
    run_on_ranks(masters_after_loading, 2, training, str(tmp_path), model_first)
