"""Boosting a lazy model: the ranks of a mesh hold it once between them.

Memory is anonymous memory, summed over ranks, as a multiple of the model's bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import TYPE_CHECKING

import pytest
import torch

from booster_core import Booster, DistCoordinator
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_testing import run_on_ranks
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""55 million parameters; what libraries keep of a first product of matrices, some 3 MiB a rank, is small beside it."""
DRAWN = {**SMALL, "vocab_size": 1000}
"""52 million; none of them in a matrix that is large compared with the others, as a rank has one whole at a time."""
WARM = {**SMALL, "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32}
"""As many layers as in any model that is measured: Python keeps the memory of its objects, some 0.3 MiB a layer."""


def write(folder: Path, settings: dict[str, int]) -> None:
    tiny_llama(**settings).save_pretrained(folder)


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Let the C library give memory of 32 KiB and more back when it is freed: what it keeps is not ours.

    The ranks of the check of layers are threads, which have a part of the C library's memory each.
    """
    libc, threshold = ctypes.CDLL(None), -3  # M_MMAP_THRESHOLD
    libc.mallopt(threshold, 1 << 15)
    try:
        yield
    finally:
        libc.mallopt(threshold, 1 << 17)  # the C library's own


def boost(settings: dict[str, int], folder: Path | None) -> tuple[int, int]:
    """Return the peak of boosting a model, and what of it is here, in bytes."""
    from transformers import LlamaForCausalLM

    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
    DistCoordinator().block_all(name="everybody is ready", timeout_seconds=60)
    # Pages of the model's file, which is mapped, are no memory of the model's; how many are there, the kernel decides.
    with freed_at_once(), peak_memory(maps_files=folder is not None) as memory:
        with LazyInitContext() as context:
            model = tiny_llama(**settings) if folder is None else LlamaForCausalLM.from_pretrained(folder)
        boosted, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    assert context.run_eagerly == {}
    return memory.peak_bytes, sum(parameter.nbytes for parameter in boosted.parameters())


def measured(settings: dict[str, int], folder: Path | None) -> float:
    """Return the sum of all ranks' peaks as a multiple of what they keep.

    A rank's peak is the least of several boosts: what boosting needs, each of them has. On a machine with other work,
    single boosts have been measured with more.
    """
    peaks = [math.inf] * 4
    for each in (WARM, settings, settings):  # first what is imported on the way, and Python's own memory
        if folder is not None:
            run_on_ranks(write, 1, folder, each, timeout_seconds=120)
        results = run_on_ranks(boost, 4, each, folder, timeout_seconds=240)
        if each is settings:
            peaks = [min(least, peak) for least, (peak, _) in zip(peaks, results, strict=True)]
    with torch.device("meta"):
        total = 4 * sum(parameter.numel() for parameter in tiny_llama(**settings).parameters())
    assert sum(here for _, here in results) == pytest.approx(total, rel=0.01)  # norms are whole on every rank
    return sum(peaks) / total


def test_a_pretrained_model_is_never_held_twice(tmp_path: Path) -> None:
    """What is read of its files, `test_lazy_pretrained` of the runtime counts."""
    assert measured(SMALL, tmp_path / "model") <= 1.2


def test_one_parameter_is_drawn_at_a_time() -> None:
    assert measured(DRAWN, None) <= 1.25
