"""Training and saving on two hosts, which are network namespaces with a cable between them."""

from pathlib import Path

import pytest
from two_hosts import two_hosts

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_bytes.py"


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as connected:
        yield connected


@pytest.mark.slow  # the tests below train on two hosts, without the demo's start
def test_the_demo_runs_on_two_hosts(hosts, tmp_path):
    size = ["--steps", 3, "--batch-size", 4, "--hidden", 64, "--layers", 2, "--corpus-bytes", 300000]
    hosts.torchrun(EXAMPLE, *size, "--out", "out")
    assert [hosts.wait(number, 240) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    assert "world      2 rank(s)" in hosts.output(0)
    assert "mean of the last 10 steps" in hosts.output(0)
    assert "validation loss" in hosts.output(0)
    assert "loss" not in hosts.output(1)
    for number in range(2):
        assert "Warning" not in hosts.output(number)
    assert (tmp_path / "out/model.safetensors.index.json").exists()


SAVE = """
import os
from pathlib import Path
import torch
from torch import nn
from booster_core import Booster, launch_from_torch
c = launch_from_torch(verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 512), nn.Linear(512, 512), nn.Linear(512, 512))
booster = Booster("cpu", None, "zero")
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
booster.backward(model(torch.ones(2, 300)).sum(), optimizer)
optimizer.step()
wrote, real = set(), os.pwrite

def pwrite(descriptor, *rest):
    wrote.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    return real(descriptor, *rest)

os.pwrite = pwrite
booster.save_checkpoint("run", step=1, model=model, optimizer=optimizer, size_per_shard=1)
print(f"rank {c.rank} wrote {sorted(wrote)}", flush=True)
values = {name: value.clone() for name, value in model.unwrap().state_dict().items()}
with torch.no_grad():
    for parameter in model.unwrap().parameters():
        parameter.zero_()
loaded = booster.load_checkpoint("run", model=model, optimizer=optimizer)
same = all(torch.equal(value, values[name]) for name, value in model.unwrap().state_dict().items())
print(f"rank {c.rank} loaded step {loaded.step}: {same}", flush=True)
"""


@pytest.mark.slow
def test_a_checkpoint_of_two_hosts_has_one_writer_for_each_file(hosts, tmp_path):
    script = tmp_path / "save.py"
    script.write_text(SAVE)
    hosts.torchrun(script)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    wrote = []
    for number in range(2):
        assert f"rank {number} loaded step 1: True" in hosts.output(number)
        (line,) = (line for line in hosts.output(number).splitlines() if f"rank {number} wrote" in line)
        wrote.append({name.strip("'") for name in line.partition("[")[2].rstrip("]").split(", ")})
    assert min(map(len, wrote)) > 1
    assert not wrote[0] & wrote[1]
