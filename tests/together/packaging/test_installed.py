"""What a user sees of installed wheels; `core/test_discovery.py` has broken plugins of third parties."""

import resource

TRAIN = """
import sys, torch
from booster_core import Booster

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin="ddp")
model, optimizer, criterion, _, _ = booster.boost(model, optimizer, torch.nn.MSELoss())
before = {name: value.clone() for name, value in model.state_dict().items()}
loss = criterion(model(torch.ones(2, 4)), torch.zeros(2, 1))
booster.backward(loss, optimizer)
optimizer.step()
assert all(not torch.equal(before[name], new) for name, new in model.state_dict().items())
print("trained", type(booster.plugin).__name__)
"""


def test_core_and_ddp_alone_train(core_and_ddp, environment_of):
    environment = environment_of(*core_and_ddp)
    assert environment.run("-c", TRAIN).stdout == "trained TorchDDPPlugin\n"
    assert "inspect" in environment.booster("--help").stdout  # a verb of booster-checkpoint


def test_listing_plugins_is_fast(core_and_ddp, environment_of):
    environment = environment_of(*core_and_ddp)
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment.booster("plugins")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Time of the processor, and the fastest of five: what else the machine does can only slow it down.
    assert min(times) < 0.3
