"""Torch's gradient compression hooks by name.

A hook replaces DDP's all-reduce of a gradient bucket by one that moves fewer bytes. Two kinds of torch's hooks have no
name here: the quantizing ones, which need every tensor on CUDA, and batched PowerSGD, which fails an assertion in torch
2.13. Any function that torch's ``register_comm_hook`` takes may be passed instead of a name.
"""

# No postponed annotations here: torch compares a hook's annotations with classes.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]  # torch does not list GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import ConfigError

Hook = Any  # Callable[[object, GradBucket], torch.futures.Future[Tensor]], which torch does not type


def allreduce(state: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in the gradients' own dtype, as DDP does without a hook."""
    return default_hooks.allreduce_hook(state, bucket)  # type: ignore[arg-type]  # None is the default group


def fp16_compress(state: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in fp16: half the bytes; gradients below 6e-8 are lost."""
    return default_hooks.fp16_compress_hook(state, bucket)  # type: ignore[arg-type]


def bf16_compress(state: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in bf16: half the bytes, three significant digits, on any backend.

    torch refuses its own hook of this name on other devices than CUDA, although gloo can sum bf16.
    """
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


_STATELESS: dict[str, Hook] = {
    "allreduce": allreduce,
    "fp16_compress": fp16_compress,
    "bf16_compress": bf16_compress,
}
_POWER_SGD = "powersgd"
BY_DTYPE = {torch.float16: "fp16_compress", torch.bfloat16: "bf16_compress"}
"""The hook that sums gradients in each dtype that is narrower than fp32."""


def check_comm_hook(hook: str | Callable[..., Any] | None) -> None:
    """Check a ``comm_hook`` option.

    Raises:
        ConfigError: If it is an unknown name.
        TypeError: If it is neither a name nor a function.
    """
    names = sorted([*_STATELESS, _POWER_SGD])
    if isinstance(hook, str) and hook not in names:
        msg = f"Unknown `comm_hook={hook!r}`. Use one of {', '.join(map(repr, names))}, or a function."
        raise ConfigError(msg)
    if hook is not None and not isinstance(hook, str) and not callable(hook):
        msg = f"`comm_hook` must be a name or a function; got `{type(hook).__name__}`."
        raise TypeError(msg)


def register_comm_hook(ddp: DistributedDataParallel, hook: str | Callable[..., Any], state: object) -> None:
    """Register a gradient compression hook on a DDP model.

    Args:
        ddp: The DDP model.
        hook: A name that `check_comm_hook` accepts, or a function.
        state: First argument of the hook; ``None`` for the default group, or PowerSGD's defaults (rank 1 after
            1,000 steps of plain averaging).

    Collective: none, but every rank must register the same hook.
    Reference: Vogels et al. 2019, "PowerSGD" (arXiv:1905.13727).
    """
    if hook == _POWER_SGD:
        state = powerSGD_hook.PowerSGDState(process_group=None) if state is None else state
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(state, _STATELESS[hook] if isinstance(hook, str) else hook)
