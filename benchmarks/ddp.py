"""Step time of the DDP plugin relative to torch's DDP: the median ratio of alternating steps on 2 gloo ranks.

Bar: 1.01, with the same options, optimizer, clipping and batch.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch
from _results import compare
from _side_by_side import llama, take_turns, tokens
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_testing import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def boosted(size: str, samples: int, precision: str | None) -> Callable[[], None]:
    """Return a step under the plugin."""
    model = llama(size)
    booster = Booster("cpu", precision, TorchDDPPlugin())
    boosted_model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    batch = tokens(size, samples)

    def step() -> None:
        loss = boosted_model(input_ids=batch, labels=batch).loss
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(size: str, samples: int, precision: str | None) -> Callable[[], None]:
    """Return the same step with plain torch."""
    model = llama(size)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = tokens(size, samples)
    enabled = precision is not None

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank(size: str, samples: int, precision: str | None, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both, step by step."""
    contenders = {"ours": boosted(size, samples, precision), "theirs": by_hand(size, samples, precision)}
    return take_turns(contenders, rounds)


def main() -> int:
    """Print the ratios; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    met = True
    for precision in (None, "bf16"):
        seconds, _ = run_on_ranks(on_rank, 2, "25M", 2, precision, rounds, timeout_seconds=900)
        what = f"step of the DDP plugin, Llama 25M, {precision or 'fp32'}"
        met &= compare(what, seconds["ours"], seconds["theirs"], yardstick="DistributedDataParallel", bar=1.01)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
