"""The loss over chunks of logits: as near to the truth as whole logits, and what it takes, against these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from device_runs.cases import Case, Figure
from torch import nn
from torch.nn import functional

from booster_runtime import linear_cross_entropy
from device_speed.measuring import Peak, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_runs.cases import Setting
    from torch import Tensor

BARS = {"time": 1.15, "memory": 0.15}


class _Losses:
    """Forward and backward of a head in bf16 and of its loss.

    Args:
        device: Where.
        tokens: How many.
        words: Length of the vocabulary.
        width: Of the hidden states.
    """

    def __init__(self, device: str, tokens: int, words: int, width: int) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(width, words, bias=False, device=device, dtype=torch.bfloat16)
        self.hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.labels = torch.randint(words, (tokens,), device=device)

    def whole(self) -> list[Tensor]:
        """Return the gradients, as models of transformers compute them."""
        loss = functional.cross_entropy(self.head(self.hidden).float(), self.labels)
        return [*torch.autograd.grad(loss, [self.hidden, self.head.weight])]

    def ours(self) -> list[Tensor]:
        """Return the gradients by chunks."""
        loss = linear_cross_entropy(self.hidden, self.head, self.labels)
        return [*torch.autograd.grad(loss, [self.hidden, self.head.weight])]

    def truth(self) -> list[Tensor]:
        """Return the gradients in fp64."""
        hidden, weight = (each.detach().double().requires_grad_() for each in (self.hidden, self.head.weight))
        return [*torch.autograd.grad(functional.cross_entropy(hidden @ weight.t(), self.labels), [hidden, weight])]


def vocabulary_loss(setting: Setting) -> Sequence[Figure]:
    """Compare gradients with those in fp64, then time and memory with those of whole logits."""
    small = _Losses(setting.device, 1024, 4096, 256)
    truth = small.truth()
    for ours, whole, exact in zip(small.ours(), small.whole(), truth, strict=True):
        error, usual = ((each.double() - exact).norm() / exact.norm() for each in (ours, whole))
        assert error < max(2 * usual, torch.finfo(torch.bfloat16).eps), f"{error} where whole logits have {usual}"
    tokens, words, width = (8192, 131072, 2048) if setting.is_real else (16, 64, 8)
    large = _Losses(setting.device, tokens, words, width)
    runs: dict[str, Callable[[], object]] = {"ours": large.ours, "whole": large.whole}
    peaks = {}
    for name, run in runs.items():
        memory = Peak(setting)
        run()
        peaks[name] = memory.num_bytes
    times = in_turns(setting, runs, 3.0)
    what, yardstick = f"loss by chunks, {tokens} tokens, {words} words, hidden {width}, bf16", "whole logits"
    return [
        Figure(f"time of the {what}", times["ours"], yardstick, times["whole"], bar=BARS["time"]),
        Figure(f"memory of the {what}", [peaks["ours"]], yardstick, [peaks["whole"]], "B", bar=BARS["memory"]),
    ]


CASES = [Case("speed: loss of a large vocabulary", vocabulary_loss, seconds=60, is_timed=True)]
