"""`DDPConfig`: the options of the DDP plugin, checked without a process group, and torch's compression hooks by name.

A compression hook replaces DDP's all-reduce of a gradient bucket by one that moves fewer bytes. Two kinds of torch's
hooks have no name here: the quantizing ones, which need every tensor on CUDA, and batched PowerSGD, which fails an
assertion in torch 2.13. Any function that torch's ``register_comm_hook`` takes may be passed instead of a name.
"""

# No postponed annotations here: torch compares a hook's annotations with classes.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]  # torch does not list GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import ConfigError
from booster_core.plugin import check_option_types


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Options of ``torch.nn.parallel.DistributedDataParallel`` under their own names, and three of ours.

    Args:
        broadcast_buffers: Broadcast rank 0's buffers at the start and after each step, so that some ranks may evaluate
            alone; of a model that is boosted without its optimizer, before each forward that records a graph.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are reduced. ``None`` is torch's default: 25, and
            1 for the bucket that is ready first.
        find_unused_parameters: Search the graph of each forward for unused parameters. ``None`` searches if the first
            step, whose gradients are averaged at the end of its backward, leaves a parameter unused; the same again
            where other parameters are trained than before. A model that is boosted without its optimizer is searched
            always, one with ``"powersgd"`` or a function as `comm_hook` never. If parameters become unused only in
            later steps, pass ``True``.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves one copy of them.
        static_graph: Declare that each step uses the same parameters in the same way.
        comm_hook: Name of a gradient compression hook (``"allreduce"``, ``"fp16_compress"``, ``"bf16_compress"`` or
            ``"powersgd"``), or a function that torch's ``register_comm_hook`` takes. ``"fp16_compress"`` and
            ``"bf16_compress"`` hold for gradients that DDP's reducer does not see as well, such as those of steps
            wholly under ``no_sync``. Other hooks are called by the reducer alone; those gradients are averaged as they
            are.
        comm_hook_state: State for the hook: a process group or ``PowerSGDState``. Created if left out.
        sync_batchnorm: Replace the model's BatchNorm layers by ``torch.nn.SyncBatchNorm``, which uses the statistics of
            the global batch. torch's does not run on CPUs.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str | Callable[..., Any] | None = None
    comm_hook_state: object = None
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            msg = f"`bucket_cap_mb={self.bucket_cap_mb}` must be positive; it is the size of a gradient bucket in MiB."
            raise ConfigError(msg)
        if self.static_graph and self.find_unused_parameters:
            msg = "`static_graph=True` finds unused parameters by itself. Leave out `find_unused_parameters=True`."
            raise ConfigError(msg)
        if self.comm_hook_state is not None and self.comm_hook is None:
            msg = "`comm_hook_state` has no effect without `comm_hook`. Pass both, or neither."
            raise ConfigError(msg)
        check_comm_hook(self.comm_hook)


Hook = Any  # Callable[[object, GradBucket], torch.futures.Future[Tensor]], which torch does not type


def bf16_compress(state: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in bf16: half the bytes, three significant digits, on any backend.

    torch refuses its own hook of this name on other devices than CUDA, although gloo can sum bf16.
    """
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


_STATELESS: dict[str, Hook] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
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


def restart_comm_hook(state: object) -> None:
    """Let a state of PowerSGD begin as new, because what it remembers of each bucket is of other buckets."""
    if isinstance(state, powerSGD_hook.PowerSGDState):
        state.iter = 0
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()
