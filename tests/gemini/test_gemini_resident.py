"""What is offloaded leaves the memory of the process: one with all of it there, and one with most of it on a disk."""

import pytest
import torch
from ranked import on_ranks

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import peak_memory

LAYERS, WIDTH, STEPS = 16, 1024, 4


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(1)
def test_resident_memory_falls_by_what_is_offloaded(precision, tmp_path):
    def train(**options):
        """Return what there is between steps beyond what there was before, the last one's peak, and what is on disk."""
        with peak_memory() as before:
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            booster = Booster("cpu", precision, GeminiPlugin(min_chunk_bytes=1 << 22, **options))
            model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(STEPS):
            with peak_memory() as used:
                optimizer.backward(model(torch.ones(4, WIDTH)).mean())
                optimizer.step()
                optimizer.zero_grad()
        memory = model.gatherer.memory
        on_disk = memory.bytes_by_place()["disk"] if memory.moves else 0
        start = used.start_bytes - before.start_bytes
        return start + used.kept_bytes, start + used.peak_bytes, on_disk

    resident, peak, _ = train()
    moved_resident, moved_peak, on_disk = train(
        offload_dir=str(tmp_path), offload_param_frac=1.0, offload_optim_frac=1.0
    )
    # The last blocks of a step may still be on their way.
    assert on_disk >= 0.7 * LAYERS * WIDTH**2 * (12 if precision is None else 14)
    assert resident - moved_resident >= 0.8 * on_disk
    assert peak - moved_peak >= 0.8 * on_disk
