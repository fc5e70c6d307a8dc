"""Time and peak memory of the loss over chunks of logits, relative to cross entropy over all logits in fp32.

Forward and backward of the head and the loss alone, in turns. Memory is what comes on top of the parameters and the
hidden states, gradients included.

    python benchmarks/vocabulary_loss.py                       # the CPU, at a size that fits a laptop
    python benchmarks/vocabulary_loss.py --device cuda --vocabulary 131072 --tokens 8192 --hidden 2048 --dtype bf16
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import torch
from _results import compare
from torch import nn

from booster_runtime import linear_cross_entropy
from booster_testing.memory import peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BARS = {"time": 1.15, "memory": 0.15}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def whole(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the loss as models of transformers compute it."""
    return nn.functional.cross_entropy(head(hidden).float(), labels)


def measure(
    loss: Callable[[Tensor, nn.Linear, Tensor], Tensor], hidden: Tensor, head: nn.Linear, labels: Tensor
) -> tuple[float, float]:
    """Return the seconds and the bytes that a forward and a backward take."""
    head.zero_grad()
    hidden.grad = None
    if hidden.device.type == "cpu":
        start = time.perf_counter()
        with peak_memory() as peak:
            loss(hidden, head, labels).backward()
        return time.perf_counter() - start, float(peak.peak_bytes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    loss(hidden, head, labels).backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start, float(torch.cuda.max_memory_allocated() - before)


def main() -> int:
    """Print the ratios; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=FORMATS, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.manual_seed(0)
    options = {"device": asked.device, "dtype": FORMATS[asked.dtype]}
    head = nn.Linear(asked.hidden, asked.vocabulary, bias=False, **options)
    hidden = torch.randn(asked.tokens, asked.hidden, **options).requires_grad_()
    labels = torch.randint(asked.vocabulary, (asked.tokens,), device=asked.device)
    ours, theirs = [], []
    for round_index in range(asked.rounds + 1):
        pair = [measure(each, hidden, head, labels) for each in (linear_cross_entropy, whole)]
        if round_index:  # the first one warms up
            ours.append(pair[0])
            theirs.append(pair[1])
    size = f"{asked.tokens} tokens, {asked.vocabulary} words, hidden {asked.hidden}, {asked.dtype}, {asked.device}"
    met = [
        compare(
            f"{what}, {size}",
            [each[index] for each in ours],
            [each[index] for each in theirs],
            yardstick="cross entropy over all logits",
            bar=BARS[what],
            unit=unit,
        )
        for index, (what, unit) in enumerate((("time", "s"), ("memory", "B")))
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
