"""Data loaders hand out batches on the device, nested and from pinned memory, unless they are told not to."""

import pytest
import torch
from simulated_device import NAME, run_on_devices
from torch import nn
from torch.utils.data import DataLoader

from booster_core import Booster


def placed_by(is_wanted):
    booster = Booster(NAME, None, "ddp", device_placement=is_wanted)
    samples = [{"x": torch.full((2,), float(index)), "rest": [torch.tensor(index), "text"]} for index in range(4)]
    loader = booster.boost(nn.Linear(2, 1), dataloader=DataLoader(samples, batch_size=1)).dataloader
    prepared = booster.prepare_dataloader(samples)
    found = []
    for each in (loader, prepared):
        for batch in each:
            number, text = batch["rest"]
            found.append((batch["x"].device.type, number.device.type, batch["x"].sum().item() / 2, number.item(), text))
    return found


@pytest.mark.parametrize("is_wanted", [True, False])
def test_loaders_hand_out_batches_on_the_device(simulated_device, is_wanted):
    device = NAME if is_wanted else "cpu"
    for rank, found in enumerate(run_on_devices(placed_by, 2, simulated_device, is_wanted)):
        assert found == [(device, device, float(index), index, ("text",)) for index in (rank, rank + 2)] * 2
