"""Settings of torch's flight recorder, which keeps the last NCCL collectives of a rank and writes them at a timeout.

NCCL's watchdog ends a process from a C++ thread, so no Python code can report then. The values are those that
torchtitan uses; the files are read by ``torchfrtrace``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_SETTINGS = (
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "20000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    # The mode in which the watchdog leaves the record alone until it is written: pytorch/pytorch#121055.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
)
"""The names of each setting, the present one first, and its value."""


def keep_flight_record(environment: MutableMapping[str, str]) -> None:
    """Let NCCL's process groups record their collectives, where the user has not set it otherwise.

    Args:
        environment: The process's environment variables, before the first process group is made.
    """
    for names, value in _SETTINGS:
        if not any(name in environment for name in names):
            environment[names[0]] = value
