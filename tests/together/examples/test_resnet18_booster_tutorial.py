"""Colossal-AI's Booster tutorial after the move: one step of ResNet-18, saved and loaded, compared with plain torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from isolated_libraries import FOLDER, missing_libraries

WITH_TORCHVISION = Path(__file__).with_name("with_torchvision.py")
SIZE = 64
BY_HAND = f"""
import torch
from torchvision.models import resnet18
torch.manual_seed(1024)
model = resnet18()
losses = []
for rank in range(int(__import__("sys").argv[1])):
    images = torch.randn(4, 3, {SIZE}, {SIZE}, generator=torch.Generator().manual_seed(rank))
    losses.append(model(images).mean())
(sum(losses) / len(losses)).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
print(float(losses[0]), float(norm))
"""


@pytest.fixture(autouse=True)
def _needs_torchvision():
    if missing_libraries(["torchvision"]):
        pytest.skip(f"torchvision is not installed, neither in the environment nor in {FOLDER}")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2])
def test_tutorial_runs(nproc, run_example, tmp_path):
    from safetensors.torch import load_file

    output = run_example(
        "resnet18_booster_tutorial.py", "--image-size", str(SIZE), cwd=tmp_path, nproc=nproc, through=WITH_TORCHVISION
    )
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    done = subprocess.run(
        [sys.executable, str(WITH_TORCHVISION), str(script), str(nproc or 1)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    loss, norm = map(float, done.stdout.split())
    line = re.search(r"loss (\S+), gradient norm (\S+), next learning rate 0.0001", output)
    assert line, output
    assert float(line[1]) == pytest.approx(loss, abs=2e-6)
    # Printed with six digits; on two ranks the gradients are summed in another order.
    assert float(line[2]) == pytest.approx(norm, rel=1e-4)
    assert "122 tensors saved to model and loaded again" in output

    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 1
    tensors = {name: value for file in files for name, value in load_file(tmp_path / "model" / file).items()}
    assert tensors.keys() == index["weight_map"].keys()
    # 10 MiB is the limit of a file unless a single tensor is larger.
    for file in files:
        sizes = [tensors[name].nbytes for name, home in index["weight_map"].items() if home == file]
        assert len(sizes) == 1 or sum(sizes) <= 10 * 2**20
