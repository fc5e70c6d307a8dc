"""`DDPConfig`: the options of the DDP plugin, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_ddp.comm_hooks import check_comm_hook

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Options of ``torch.nn.parallel.DistributedDataParallel`` under their own names, and three of ours.

    Args:
        broadcast_buffers: Broadcast rank 0's buffers at the start and before each forward that is followed by a
            synchronized backward.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are reduced. ``None`` is torch's default: 25, and
            1 for the bucket that is ready first.
        find_unused_parameters: Search the graph of each forward for unused parameters. ``None`` decides in the first
            step whether that is needed. If parameters become unused only in later steps, pass ``True``.
        check_reduction: Accepted by torch for old scripts, without effect; ``True`` raises.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves one copy of them.
        static_graph: Declare that each step uses the same parameters in the same way.
        comm_hook: Name of a gradient compression hook, see `booster_ddp.comm_hooks`, or a function that torch's
            ``register_comm_hook`` takes. ``"fp16_compress"`` and ``"bf16_compress"`` hold for gradients that DDP's
            reducer does not see as well: those of the first step, where ``find_unused_parameters=None`` decides, and of
            ``no_sync``. Other hooks are called by the reducer alone; those gradients are averaged as they are.
        comm_hook_state: State for the hook: a process group or ``PowerSGDState``. Created if left out.
        sync_batchnorm: Replace the model's BatchNorm layers by ones that use the statistics of the global batch.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool | None = None
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str | Callable[..., Any] | None = None
    comm_hook_state: object = None
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            msg = f"`bucket_cap_mb={self.bucket_cap_mb}` must be positive; it is the size of a gradient bucket in MiB."
            raise ConfigError(msg)
        if self.check_reduction:
            msg = (
                "`check_reduction=True` has no effect in torch any more: an unfinished reduction raises. Leave it out."
            )
            raise ConfigError(msg)
        if self.static_graph and self.find_unused_parameters:
            msg = "`static_graph=True` finds unused parameters by itself. Leave out `find_unused_parameters=True`."
            raise ConfigError(msg)
        if self.comm_hook_state is not None and self.comm_hook is None:
            msg = "`comm_hook_state` has no effect without `comm_hook`. Pass both, or neither."
            raise ConfigError(msg)
        check_comm_hook(self.comm_hook)
