"""The direct transport: ranks of one host read each other's memory. x86-64 Linux only.

Over the loopback interface the kernel copies every byte twice, on threads that compete with compute. The system call
``process_vm_readv`` copies once, from one process into another, on the thread that needs the bytes (MPI libraries call
this cross memory attach). A rank posts the address of its tensor, the others read what they need, and post when they
have.

There is no threshold of size. From 8 bytes to 1 MiB, on 2 and 4 ranks with 13 busy processes per core, reading took
0.74 of the portable transport's time (median over sizes and operations) and as much CPU time; where it was slower, that
was not at one end of the sizes. ``benchmarks/collectives.py`` measures both.
"""

from booster_runtime.collectives.transports.direct.channel import Channel
from booster_runtime.collectives.transports.direct.connection import connect, make_offer
from booster_runtime.collectives.transports.direct.transport import DirectTransport

__all__ = ["Channel", "DirectTransport", "connect", "make_offer"]
