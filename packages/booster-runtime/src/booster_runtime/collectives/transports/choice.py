"""Which transport a process group uses: agreed on by its ranks at its first collective."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime.collectives.settings import DIRECT, TORCH, checks_collectives, requested_transport
from booster_runtime.collectives.transports.alone import AloneTransport
from booster_runtime.collectives.transports.checked import CheckedTransport
from booster_runtime.collectives.transports.direct import DirectTransport, connect, make_offer
from booster_runtime.collectives.transports.torch import TorchTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.transports.protocol import Transport

_transports: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()
_overridden: dict[str, weakref.WeakKeyDictionary[ProcessGroup, Transport]] = {}
_override: list[str] = []
_factories: list[Callable[[ProcessGroup], Transport]] = []


def transport_of(group: ProcessGroup | None) -> Transport:
    """Return the transport of a group; ``None`` is the default group.

    Raises:
        ConfigError: If the ranks' environment variables contradict each other or can't be honoured. Every rank raises.

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
def override(name: str) -> Iterator[None]:
    """Use another transport for every group inside the block, as tests and benchmarks do to compare them.

    Args:
        name: ``"auto"``, ``"torch"`` or ``"direct"``, in place of `BOOSTER_TRANSPORT`.

    Collective: every rank.
    """
    global _transports  # noqa: PLW0603 - one lookup per collective, without a second one for the override
    outside, _transports = _transports, _overridden.setdefault(name, weakref.WeakKeyDictionary())
    _override.append(name)
    try:
        yield
    finally:
        _override.pop()
        _transports = outside


@contextlib.contextmanager
def made_by(factory: Callable[[ProcessGroup], Transport]) -> Iterator[None]:
    """Let a function make the transport of every group inside the block, as planning does to count.

    Args:
        factory: Called at a group's first collective.

    Collective: every rank.
    """
    global _transports  # noqa: PLW0603 - as in `override`
    outside, _transports = _transports, weakref.WeakKeyDictionary()
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.pop()
        _transports = outside


def choose(group: ProcessGroup) -> Transport:
    """Return a transport for a group, agreed on by its ranks.

    Raises:
        ConfigError: As `transport_of`.

    Collective: every rank of the group.
    """
    if dist.get_world_size(group) == 1:
        return AloneTransport()
    portable = TorchTransport(group)
    own = _own_facts()
    facts = portable.all_gather_object(own)
    names = dist.get_process_group_ranks(group)
    _raise_problems(names, facts)
    chosen: Transport = portable
    requested = {fact["requested"] for fact in facts}
    if TORCH not in requested:
        channel, reason = connect(group, portable, own["offer"], [fact["offer"] for fact in facts])
        if channel is not None:
            chosen = DirectTransport(channel, portable)
        elif DIRECT in requested:
            msg = f"BOOSTER_TRANSPORT=direct, but {reason}. Set it to torch, or to auto to use direct where possible."
            raise ConfigError(msg)
    if own["is_checked"]:
        return CheckedTransport(chosen, group)
    return chosen


def _own_facts() -> dict[str, Any]:
    """Return what this rank's environment asks for; an error travels too, so that every rank raises it."""
    try:
        requested = _override[-1] if _override else requested_transport()
        is_checked = checks_collectives()
    except ConfigError as error:
        return {"problem": str(error)}
    offer = None if requested == TORCH else make_offer()
    return {"problem": None, "requested": requested, "is_checked": is_checked, "offer": offer}


def _raise_problems(names: Sequence[int], facts: Sequence[dict[str, Any]]) -> None:
    """Raise what is wrong with any rank's settings.

    Raises:
        ConfigError: On every rank, as all have the same facts.
    """
    for name, fact in zip(names, facts, strict=True):
        if fact["problem"]:
            msg = f"Rank {name}: {fact['problem']}"
            raise ConfigError(msg)
    checking = [name for name, fact in zip(names, facts, strict=True) if fact["is_checked"]]
    if 0 < len(checking) < len(names):
        msg = (
            f"BOOSTER_DEBUG=collectives is set on ranks {checking} only, of a group of ranks {list(names)}. Set it on "
            "every rank or on none."
        )
        raise ConfigError(msg)
    wanting, refusing = (
        [name for name, fact in zip(names, facts, strict=True) if fact["requested"] == wish] for wish in (DIRECT, TORCH)
    )
    if wanting and refusing:
        msg = (
            f"BOOSTER_TRANSPORT is direct on ranks {wanting} and torch on ranks {refusing}. Set it to the same value "
            "on every rank."
        )
        raise ConfigError(msg)
