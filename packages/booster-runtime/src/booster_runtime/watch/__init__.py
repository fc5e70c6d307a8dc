"""The monitor: when a rank fails or dies, the others end, and a collective that times out names the missing ranks.

Rank 0 runs a small server in a thread (`server`); every rank holds one connection to it from a thread of its own
(`member`, set up by `start`; `sockets` has what both ends share). The kernel closes the connection of a process that
ends, so no heartbeat is needed and a busy rank is never taken for dead. `verdicts` decides what has failed, from how
far each rank has come through its calls, which `booster_core.ranks.calls` notes, and from the collectives that torch
has recorded (`flight_recorder`).
"""

from booster_runtime.watch.member import MonitorMember
from booster_runtime.watch.start import start_monitor

__all__ = ["MonitorMember", "start_monitor"]
