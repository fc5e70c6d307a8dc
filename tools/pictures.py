"""Make the pictures of docs/pictures.md: ``python tools/pictures.py`` runs each command of that page on a small model.

The pictures differ a little with every run, as times and memory do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from workspace import ROOT

ASSETS = ROOT / "docs" / "assets" / "pictures"
BOOSTER = ("-c", "import sys; from booster_core.cli import main; main(prog_name='booster')")

MODEL = """
import sys, torch, booster_core
from booster_core import Booster
from booster_tools.tracking import JsonLines, track, watch_memory

torch.manual_seed(0)
def network(width=1024, layers=8):
    parts = ([torch.nn.Linear(width, width), torch.nn.GELU()] for _ in range(layers))
    return torch.nn.Sequential(*(torch.nn.Sequential(*part) for part in parts))
"""
MEMORY = """
booster_core.launch(verbose=False)
model = network()
booster = Booster(plugin=sys.argv[1])
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
torch.manual_seed(torch.distributed.get_rank())
with watch_memory(model, sys.argv[2]):
    for _ in range(3):
        booster.backward(model(torch.randn(2048, 1024)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
"""
CURVE = """
model = torch.nn.Linear(16, 1)
data = torch.randn(400, 16)
target = data @ torch.randn(16, 1)
booster = Booster()
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
with track(optimizer, JsonLines(sys.argv[1])) as run:
    for step in range(200):
        part = torch.randint(400, (8,))
        loss = (model(data[part]) - target[part]).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
"""
PLAN = """
def build():
    model = network(4096, 24)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda outputs, batch: outputs.square().mean()
def batch():
    return torch.zeros(8192, 4096)
"""


def run(*arguments: str, ranks: int = 1) -> None:
    """Run a Python command, on several ranks by torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    # The C library returns freed blocks of a MiB to the kernel, so that plots show what is in use.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **malloc}
    subprocess.run([sys.executable, *launcher, *arguments], check=True, env=environment)


def draw(verb: str, *arguments: str) -> None:
    """Run a verb that draws into a folder of its own, and keep what it draws, light and dark."""
    for ending, more in (("", ()), ("-dark", ("--dark",))):
        run(*BOOSTER, verb, *arguments, *more)
        for path in Path(arguments[0].partition(":")[0]).parent.glob("*.png"):
            shutil.move(path, ASSETS / f"{path.stem}{ending}.png")


def main() -> None:
    """Make all pictures, or those that are named."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    wanted = set(sys.argv[1:]) or {"memory", "curve", "plan"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)

        def script(name: str, text: str) -> str:
            path = home / f"{name}.py"
            path.write_text(MODEL + text, encoding="utf-8")
            return str(path)

        if "memory" in wanted:
            run(script("memory", MEMORY), "zero", str(home / "zero"), ranks=2)
            (home / "zero" / "step-memory-rank0.trace.json").rename(home / "step-memory-zero.trace.json")
            draw("plot", str(home / "step-memory-zero.trace.json"))
        if "curve" in wanted:
            run(script("curve", CURVE), str(home / "metrics.jsonl"))
            draw("plot", str(home / "metrics.jsonl"), "loss")
        if "plan" in wanted:
            devices = ("--devices", "64", "--memory", "6GiB", "--interconnect", "400Gbps")
            named = [argument for plugin in ("ddp", "zero", "gemini") for argument in ("--plugin", plugin)]
            picture = ("--picture", str(home / "plan.png"))
            draw("plan", f"{script('plan', PLAN)}:build", *devices, *named, *picture)


if __name__ == "__main__":
    main()
