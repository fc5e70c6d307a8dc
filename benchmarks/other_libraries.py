"""Step time of the DDP and ZeRO plugins relative to Accelerate, Lightning Fabric and DeepSpeed, on 2 gloo ranks.

Each library has a file in ``yardsticks``, and is left out, with the reason, where it is not installed or does not run
here. There are no bars: the figures are for comparing. All steps alternate in the same processes.

    python benchmarks/other_libraries.py --rounds 20 --only accelerate
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _results import compare
from _side_by_side import llama, take_turns, tokens

from booster_core import Booster
from booster_testing import close_ranks, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

YARDSTICKS = sorted(path.stem for path in (Path(__file__).parent / "yardsticks").glob("*.py"))
TITLES = {"ddp": "DDP plugin", "zero": "ZeRO plugin, stage 1"}


def load(name: str) -> Any:
    """Import the adapter of a library, as a module of another name than the library's.

    Raises:
        ImportError: If the library is not installed.
    """
    path = Path(__file__).parent / "yardsticks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"yardstick_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def boosted(plugin: str, precision: str | None, samples: int) -> Callable[[], None]:
    """Return a step under a plugin of ours."""
    model = llama("25M")
    booster = Booster("cpu", precision, plugin)
    trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    batch = tokens("25M", samples)

    def step() -> None:
        booster.backward(trained(input_ids=batch, labels=batch).loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank(name: str, precision: str | None, samples: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of ours and of a library, step by step."""
    warnings.filterwarnings("ignore")
    yardstick = load(name)
    ours = boosted(yardstick.AGAINST, precision, samples)
    theirs = yardstick.make_step(llama("25M"), tokens("25M", samples), precision)
    return take_turns({"ours": ours, "theirs": theirs}, rounds)


def main() -> None:
    """Report the ratios, and which libraries are left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=YARDSTICKS, nargs="+", default=YARDSTICKS)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    for name in asked.only:
        try:
            yardstick = load(name)
        except ImportError as error:
            print(f"{name} is left out: {error}. Install it to compare with it.", flush=True)
            continue
        for precision in (None, "bf16"):
            seconds, *_ = run_on_ranks(on_rank, 2, name, precision, 2, asked.rounds, timeout_seconds=900)
            what = f"step of the {TITLES[yardstick.AGAINST]}, Llama 25M, {precision or 'fp32'}"
            compare(what, seconds["ours"], seconds["theirs"], yardstick=yardstick.NAME, bar=None)
            close_ranks()  # libraries keep settings in the process, such as the precision


if __name__ == "__main__":
    main()
