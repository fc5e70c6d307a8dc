"""`deterministic`: the switches of torch and cuBLAS that make a run repeat itself bit for bit."""

from __future__ import annotations

import os

import torch

from booster_core.errors import ConfigError
from booster_core.ranks import current_world, seed_everything

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")
"""The sizes with which cuBLAS repeats its results; torch accepts no others (its notes on reproducibility)."""


def deterministic(seed: int = 1024, *, warn_only: bool = False) -> int:
    """Let this process repeat its results: seeds, torch's deterministic algorithms, and cuBLAS's workspace.

    Call it first in the script, and pass its result on, as `launch` seeds, too::

        coordinator = launch_from_torch(seed=deterministic(7))

    Operations without a deterministic form then raise torch's error. It stays for the rest of the process.

    Args:
        seed: Seed of Python's, NumPy's and torch's random numbers, ``0 <= seed < 2**32``.
        warn_only: Warn of operations without a deterministic form, in place of an error.

    Returns:
        The seed.

    Raises:
        ConfigError: If the seed is out of range, if the launch or CUDA came first, or if ``CUBLAS_WORKSPACE_CONFIG``
            has a value with which results vary. Nothing has been set then.

    Collective: none; every rank calls it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        msg = f"`seed={seed!r}` of `deterministic` is not an integer from 0 to 2**32 - 1."
        raise ConfigError(msg)
    if current_world().generation:  # a group that Ray or Accelerate started has none
        msg = "`deterministic` came after `launch`. Call it before: `launch_from_torch(seed=deterministic(...))`."
        raise ConfigError(msg)
    workspace = os.environ.get(_VARIABLE)
    if workspace is not None and workspace not in _WORKSPACES:
        msg = f"With {_VARIABLE}={workspace!r} results vary. Set it to {' or '.join(_WORKSPACES)}, or unset it."
        raise ConfigError(msg)
    if workspace is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        msg = (
            f"CUDA has started, so that {_VARIABLE} may be too late. Call `deterministic` before anything uses a GPU, "
            f"or `export {_VARIABLE}={_WORKSPACES[0]}` before the script starts."
        )
        raise ConfigError(msg)
    os.environ.setdefault(_VARIABLE, _WORKSPACES[0])
    torch.use_deterministic_algorithms(True, warn_only=warn_only)  # noqa: FBT003 - torch's only form
    torch.backends.cudnn.benchmark = False  # it chooses between algorithms by their time
    seed_everything(seed)
    return seed
