"""Collectives between ranks of one host by reading each other's memory.

Over the loopback interface every byte is copied twice by the kernel and handled by threads that compete with compute.
Between processes of one host Linux copies straight from one into the other (``process_vm_readv``; MPI libraries call it
cross memory attach): once, on the thread that needs the bytes, without memory of its own. A rank says where its
tensor lies, the others read what they need of it, and say when they have.
"""

from booster_runtime.collectives.direct.channel import Channel, channel_of, is_enabled, set_enabled

__all__ = ["Channel", "channel_of", "is_enabled", "set_enabled"]
