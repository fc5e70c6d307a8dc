"""What a launch sets in this process: the backend that can run here, the CUDA device and the seeds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


def choose_backend(backend: str | None) -> str:
    """Return the backend to use: the one asked for, if it can run here."""
    import torch

    has_cuda = torch.cuda.is_available()
    if backend is None:
        return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    if "nccl" in backend and not has_cuda:
        msg = f"`backend={backend!r}` needs CUDA, and no CUDA device is here. Leave `backend` out, or use 'gloo'."
        raise ConfigError(msg)
    return backend


def use_device(local_rank: int) -> torch.device | None:
    """Make the CUDA device of a local rank the current one, where there is CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    # Modulo: a task of srun may see its own device alone, whatever its local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random numbers."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what a user's script draws from
    torch.manual_seed(seed)
