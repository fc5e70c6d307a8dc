"""How far each rank has come through the calls that all ranks make, and the sentences that say so.

A record is what `booster_core.ranks.PROGRESS` of a rank held when it was last heard of. The sentences are in the past
tense, so that they fit one rank and several.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_core.ranks import name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_runtime.watch.wire import Message

Call = tuple[str, int]
"""The name of a call, and which of the calls of that name it is."""

_MAX_NAMED = 10
_RULE = "Every rank must make the same calls in the same order"
_REMEDY = f"{_RULE}: not under `if rank == 0`, and with as many batches on each."
_EXIT = "The monitor can't see the code of a `sys.exit`: if there was one, that rank's output says why."


@dataclass(frozen=True, kw_only=True)
class Record:
    """One rank's progress; see `booster_core.ranks.world.Progress`.

    Args:
        counts: How often each call has begun.
        last: The call that has begun or ended last.
        is_finished: Whether it has ended.
        call: The outermost call that the rank is in.
        ranks: The ranks that make that call together; ``None`` for all.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    last: Call | None = None
    is_finished: bool = True
    call: Call | None = None
    ranks: frozenset[int] | None = None

    @classmethod
    def parse(cls, message: Message) -> Record:
        """Return the record that a rank has sent.

        Raises:
            ValueError: If it is none; also TypeError, OverflowError and AttributeError.
        """
        ranks = message.get("ranks")
        return cls(
            counts={str(name): int(count) for name, count in (message.get("counts") or {}).items()},
            last=parse_call(message.get("last")),
            is_finished=bool(message.get("finished", True)),
            call=parse_call(message.get("call")),
            ranks=None if ranks is None else frozenset(int(rank) for rank in ranks),
        )

    def has_begun(self, call: Call) -> bool:
        """Return whether the rank has come to a call."""
        return self.counts.get(call[0], 0) >= call[1]

    def place(self) -> str:
        """Say where the rank was."""
        if self.last is None:
            return "made no such call yet"
        return f"{'last finished' if self.is_finished else 'entered'} `{self.last[0]}` #{self.last[1]}"


def parse_call(value: Sequence[object] | None) -> Call | None:
    """Return the call that a message names.

    Raises:
        ValueError: If it names none; also TypeError and OverflowError.
    """
    if value is None:
        return None
    name, count = value
    return str(name), int(count)  # type: ignore[call-overload] # whatever it is, it is refused where it is no number


def describe_places(places: Mapping[int, str]) -> str:
    """Return where each rank was, ranks at the same place together."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        ranks[place].append(rank)
    groups = [f"{name_ranks(group)} {place}" for place, group in ranks.items()]
    more = [f"{len(groups) - _MAX_NAMED} other places"] if len(groups) > _MAX_NAMED else []
    return "; ".join(groups[:_MAX_NAMED] + more)


def describe_missing(places: Mapping[int, str]) -> str:
    """Say which ranks have not come to a call that timed out, and where they were; ``places`` holds only those."""
    if not places:
        return (
            "every rank has reached it, so ranks call different collectives in it, or one is too slow. Raise "
            "`timeout_seconds` in the launch if it may take that long."
        )
    missing = sorted(places)
    if len(missing) == 1:
        return f"{name_ranks(missing)} has not reached it; it {places[missing[0]]}. {_RULE}."
    return f"{name_ranks(missing)} have not reached it; {describe_places(places)}. {_RULE}."


def describe_ended(ended: Sequence[int], waiting: Sequence[int], call: Call) -> str:
    """Say that some ranks will never come to a call in which others wait."""
    return (
        f"{name_ranks(ended)} ended normally while {name_ranks(waiting)} {_verb(waiting, 'wait')} in `{call[0]}` "
        f"#{call[1]}, which {'it' if len(ended) == 1 else 'they'} never called. {_REMEDY} {_EXIT}"
    )


def describe_mismatch(calls: Mapping[Call, Sequence[int]]) -> str:
    """Say that ranks wait for each other in different calls."""
    places = [
        f"{name_ranks(ranks)} {_verb(ranks, 'wait')} in `{name}` #{count}"
        for (name, count), ranks in sorted(calls.items(), key=lambda item: min(item[1]))
    ]
    return f"the ranks wait for each other in different calls: {', and '.join(places)}. {_REMEDY}"


def describe_death(rank: int, how: str) -> str:
    """Say that a rank was lost that said nothing itself."""
    if how == "died":
        how = (
            "died without a traceback: killed by a signal, by the system because memory ran out, or ended by its own "
            "code (`os._exit`)"
        )
    else:
        how = f"{how}: its machine or the network is down"
    return f"Booster: rank {rank} {how}."


def _verb(subjects: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
