"""A training step under DeepSpeed's ZeRO stage 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = f"DeepSpeed {deepspeed.__version__}, ZeRO stage 1"
AGAINST = "zero"


def make_step(model: torch.nn.Module, batch: Any, precision: str | None) -> Callable[[], None]:
    """Return a step: forward, backward, clipping, fused AdamW.

    Collective: every rank.
    """
    settings = {
        "train_micro_batch_size_per_gpu": len(batch),
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step() -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    return step
