"""Which transport a process group uses: made at its first collective, where its ranks agree on what is compared."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime.collectives.settings import checks_collectives
from booster_runtime.collectives.transports.alone import AloneTransport
from booster_runtime.collectives.transports.checked import CheckedTransport
from booster_runtime.collectives.transports.torch import TorchTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.transports.protocol import Transport

_transports: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()
_factories: list[Callable[[ProcessGroup], Transport]] = []


def transport_of(group: ProcessGroup | None) -> Transport:
    """Return the transport of a group; ``None`` is the default group.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` is wrong, or set on some ranks only. Every rank raises.

    Collective: every rank of the group, the first time.
    """
    key = dist.group.WORLD if group is None else group
    if key is None:
        msg = "A collective needs a process group: start one by `booster_core.launch` or `init_process_group`."
        raise RuntimeError(msg)
    transport = _transports.get(key)
    if transport is None:
        transport = _transports[key] = (_factories[-1] if _factories else choose)(key)
    return transport


@contextlib.contextmanager
def made_by(factory: Callable[[ProcessGroup], Transport]) -> Iterator[None]:
    """Let a function make the transport of every group inside the block, as planning does to count.

    Args:
        factory: Called at a group's first collective.

    Collective: every rank.
    """
    global _transports  # noqa: PLW0603 - one lookup per collective, without a second one for the block
    outside, _transports = _transports, weakref.WeakKeyDictionary()
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.pop()
        _transports = outside


def choose(group: ProcessGroup) -> Transport:
    """Return a transport for a group: `torch.distributed`, with calls compared first where every rank asks for it.

    Raises:
        ConfigError: As `transport_of`.

    Collective: every rank of the group.
    """
    if dist.get_world_size(group) == 1:
        return AloneTransport()
    transport = TorchTransport(group)
    return CheckedTransport(transport, group) if _agree_on_checks(group, transport) else transport


def _agree_on_checks(group: ProcessGroup, transport: Transport) -> bool:
    """Return whether the ranks compare their calls.

    Raises:
        ConfigError: On every rank, as all have the same answers.
    """
    try:
        own = checks_collectives(), ""
    except ConfigError as error:
        own = False, str(error)  # travels too, so that every rank raises it
    names = dist.get_process_group_ranks(group)
    answers = transport.all_gather_object(own)
    for name, (_, problem) in zip(names, answers, strict=True):
        if problem:
            msg = f"Rank {name}: {problem}"
            raise ConfigError(msg)
    checking = [name for name, (checks, _) in zip(names, answers, strict=True) if checks]
    if 0 < len(checking) < len(names):
        msg = (
            f"BOOSTER_DEBUG=collectives is set on ranks {checking} only, of a group of ranks {names}. Set it on "
            "every rank or on none."
        )
        raise ConfigError(msg)
    return bool(checking)
