"""Step time of the FSDP plugin relative to torch's ``fully_shard``, over alternating steps on 2 gloo ranks.

Bar: 1.01, with the same units, options, optimizer, clipping and batch.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch
from _results import compare
from _side_by_side import llama, take_turns, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def boosted(size: str, samples: int, precision: str | None) -> Callable[[], None]:
    """Return a step under the plugin, whose units are the model's embedding, layers and head by default."""
    model = llama(size)
    booster = Booster("cpu", precision, TorchFSDPPlugin())
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
    model: Any = llama(size)
    formats = MixedPrecisionPolicy()
    if precision is not None:
        formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.lm_head, mp_policy=formats, reshard_after_forward=False)
    for layer in reversed(model.model.layers):
        fully_shard(layer, mp_policy=formats)
    fully_shard(model.model.embed_tokens, mp_policy=formats)
    model.model.embed_tokens.set_unshard_in_backward(False)
    fully_shard(model, mp_policy=formats)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = tokens(size, samples)

    def step() -> None:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank(size: str, samples: int, precision: str | None, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender, step by step."""
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
        what = f"step of the FSDP plugin, Llama 25M, {precision or 'fp32'}"
        met &= compare(what, seconds["ours"], seconds["theirs"], yardstick="fully_shard", bar=1.01)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
