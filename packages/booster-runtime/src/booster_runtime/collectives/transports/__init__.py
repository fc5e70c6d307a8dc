"""How collectives travel: a `Transport` per process group, chosen when the group is first used.

``torch`` works everywhere: `torch.distributed` over gloo, NCCL or another backend. ``direct`` reads the memory of other
processes of the same host; x86-64 Linux only.
"""

from booster_runtime.collectives.transports.choice import override, transport_of
from booster_runtime.collectives.transports.protocol import Transport

__all__ = ["Transport", "override", "transport_of"]
