"""Data loaders hand out batches on the device, nested and from pinned memory, unless they are told not to.

Batches there are told apart as those on the host are, without a wait for the device.
"""

import pytest
import torch
import torch.distributed as dist
from host_waits import HostWaits
from simulated_device import NAME, on_devices
from torch import nn
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_hybrid.same_training import BatchNumbers


@pytest.mark.parametrize("is_wanted", [True, False])
@on_devices(2)
def test_loaders_hand_out_batches_on_the_device(simulated_device, is_wanted):
    booster = Booster(NAME, None, "ddp", device_placement=is_wanted)
    samples = [{"x": torch.full((2,), float(index)), "rest": [torch.tensor(index), "text"]} for index in range(4)]
    loader = booster.boost(nn.Linear(2, 1), dataloader=DataLoader(samples, batch_size=1)).dataloader
    prepared = booster.prepare_dataloader(samples)
    found = []
    for each in (loader, prepared):
        for batch in each:
            number, text = batch["rest"]
            found.append((batch["x"].device.type, number.device.type, batch["x"].sum().item() / 2, number.item(), text))
    device, rank = NAME if is_wanted else "cpu", dist.get_rank()
    assert found == [(device, device, float(index), index, ("text",)) for index in (rank, rank + 2)] * 2


@on_devices(1)
def test_values_on_the_device_count_in_the_next_number(simulated_device):
    found = []
    for seeds in ([1, 2, 2], [1, 3, 2]):
        numbers = BatchNumbers()
        batches = [torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        batches = [{"input_ids": batch.to(NAME), "mask": torch.ones(4, 8)} for batch in batches]
        with HostWaits(NAME) as waits:
            found.append([numbers.take(batch) for batch in batches])
        assert [each for each in waits.found if "item" in each or "scalar" in each] == []
    first, second = found
    assert first[:2] == second[:2]
    assert first[2] != second[2]
