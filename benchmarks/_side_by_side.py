"""Time training steps side by side: all contenders run in the same processes, in alternating steps.

Timings are noisy and drift, so only ratios of adjacent steps are reported. A step's time is that of the slower rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Size:
    """A Llama's size; the bars are defined for this sequence length and batch."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int


SIZES = {"25M": Size(384, 10, 8000, 6), "110M": Size(768, 12, 16000, 12)}
LENGTH = 128


def llama(size: str) -> nn.Module:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    chosen = SIZES[size]
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=chosen.vocabulary,
            hidden_size=chosen.hidden,
            intermediate_size=chosen.hidden * 8 // 3 // 32 * 32,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.heads,
            num_key_value_heads=chosen.heads,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def tokens(size: str, samples: int) -> torch.Tensor:
    """Return this rank's batch, shape ``(samples, 128)``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(SIZES[size].vocabulary, (samples, LENGTH), generator=generator)


def take_turns(contenders: Mapping[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps by round; each is the slower rank's.

    Collective: every rank.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        # The order is reversed in each round, so that garbage collections don't always affect the same contender.
        for name in names if number % 2 else reversed(names):
            dist.barrier()
            start = time.perf_counter()
            contenders[name]()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= warmup:
                seconds[name].append(float(taken))
    return seconds
