"""`DistributedDataParallel` whose broadcast of buffers leaves the graphs of earlier forwards usable.

A layer such as BatchNorm updates its buffers in forward without telling autograd, so that one process may run two
forwards before the first backward. DDP's broadcast before each forward changes the same buffers. torch 2.10 lets
autograd count that as a change, and the first backward raises; later releases hide it, as this class does.
"""

from __future__ import annotations

from torch._compile import _disable_dynamo
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import parallel


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's class, whose broadcast of buffers is no change for autograd."""

    @_disable_dynamo  # the compiler leaves torch's own class alone
    def _sync_buffers(self) -> None:
        with _unsafe_preserve_version_counter(tuple(self.modules_buffers)):  # as torch 2.13
            super()._sync_buffers()  # type: ignore[no-untyped-call]
