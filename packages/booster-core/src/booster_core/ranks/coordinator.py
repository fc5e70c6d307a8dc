"""Rank facts and small collective calls for whoever needs to know where it runs.

`DistCoordinator` is a plain object, made wherever it is needed, and works the same without a process group, as a world
of one where nobody waits. Its collective calls meet first (`block_all`), so that an error names a rank that never
comes.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from booster_core import errors
from booster_core.errors import ConfigError, RankFailedError, name_ranks
from booster_core.ranks.digests import describe_differences, digest, plain_form
from booster_core.ranks.world import PROGRESS, close_world, current_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import ParamSpec, Self

    _P = ParamSpec("_P")

_R = TypeVar("_R")

_SAME = "Pass the same on all ranks."


class DistCoordinator:
    """The position of this process among all, and ways for all to agree.

    Describes the default process group as it is when the object is made. Where a ``process_group`` is asked for,
    ``None`` stands for all ranks, and only the ranks of the group call.
    """

    def __init__(self) -> None:
        self._world = current_world()

    def __repr__(self) -> str:
        return f"DistCoordinator(rank={self.rank}, world_size={self.world_size}, local_rank={self.local_rank})"

    @property
    def rank(self) -> int:
        """This process' rank, ``0 <= rank < world_size``."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes; 1 without a process group."""
        return self._world.world_size

    @property
    def local_rank(self) -> int:
        """This process' index on its host."""
        return self._world.local_rank

    @property
    def timeout_seconds(self) -> float:
        """How long collective calls wait for missing ranks unless told otherwise."""
        return self._world.timeout_seconds

    def is_master(self, process_group: ProcessGroup | None = None) -> bool:
        """Whether this is the first rank of the group."""
        return self.rank == self._ranks(process_group)[0]

    def is_node_master(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_rank == 0

    def is_last_process(self, process_group: ProcessGroup | None = None) -> bool:
        """Whether this is the last rank of the group."""
        return self.rank == self._ranks(process_group)[-1]

    def print_on_master(self, *values: object, process_group: ProcessGroup | None = None) -> None:
        """Print on the first rank of the group only."""
        if self.is_master(process_group):
            print(*values, flush=True)  # noqa: T201 - printing is the purpose

    def print_on_node_master(self, *values: object) -> None:
        """Print on the first process of each host only."""
        if self.is_node_master():
            print(*values, flush=True)  # noqa: T201 - printing is the purpose

    def on_master_only(
        self, process_group: ProcessGroup | None = None
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]:
        """Return a decorator under which a function runs on the first rank and returns ``None`` elsewhere.

        ``@coordinator.on_master_only()`` decorates; nobody waits for the first rank.
        """

        def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
            @functools.wraps(function)
            def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

    @contextlib.contextmanager
    def priority_execution(
        self,
        executor_rank: int = 0,
        process_group: ProcessGroup | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Iterator[None]:
        """Run the body on ``executor_rank`` first, and on the others once it is through there.

        For work that one rank does for all, such as filling a cache that the others then read. If the body raises on
        ``executor_rank``, it raises everywhere.

        Args:
            executor_rank: World rank that goes first.
            process_group: The ranks that take part.
            timeout_seconds: How long the others wait for it.

        Raises:
            ConfigError: If ``executor_rank`` is not one of the ranks.

        Collective: every rank of the group.
        """
        ranks = self._ranks(process_group)
        if executor_rank not in ranks:
            msg = f"`executor_rank={executor_rank}` takes no part. Use one of {name_ranks(ranks)}."
            raise ConfigError(msg)
        together = self.together("priority_execution", process_group=process_group, timeout_seconds=timeout_seconds)
        if self.rank == executor_rank:
            with together:
                yield
        else:
            with together:
                pass
            yield

    def together(
        self, name: str, *, process_group: ProcessGroup | None = None, timeout_seconds: float | None = None
    ) -> Together:
        """Return a context that raises on every rank what its body raises on any.

        Values that the body hands to `Together.compare` are compared in the same meeting.

        Ranks wait for each other at its end; see `block_all`. The body contains no collectives. A rank whose own body
        raised raises that. The others raise the first rank's error: the same class where it is Booster's or Python's
        own and takes one message, else `RankFailedError`; the message starts with the rank.

        Args:
            name: What the user called; appears in messages.
            process_group: The ranks that take part.
            timeout_seconds: How long to wait for the others; the launch's time limit by default.

        Raises:
            MissingRanksError: If some ranks did not call in time, on ranks whose body did not raise.
            Exception: What the bodies raised.

        Collective: every rank of the group.
        """
        return Together(self, name, process_group, timeout_seconds)

    def agree(
        self,
        name: str,
        value: Any,
        *,
        remedy: str = _SAME,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Raise on every rank unless all have the same ``value``.

        Values are compared by `digest`. The error names the ranks that differ and, of mappings, the keys.

        Args:
            name: What the user called; appears in messages.
            value: The same on every rank, as `digest` takes it.
            remedy: The end of the message: what to do about a difference.
            process_group: The ranks that take part.

        Raises:
            ConfigError: If values differ.

        Collective: every rank of the group.
        """
        with self.together(name, process_group=process_group) as meeting:
            meeting.compare(value, remedy=remedy)

    def block_all(
        self,
        process_group: ProcessGroup | None = None,
        *,
        name: str = "block_all",
        timeout_seconds: float | None = None,
    ) -> None:
        """Wait until all ranks have come here.

        Args:
            process_group: The ranks that wait for each other.
            name: What the user called; appears in messages.
            timeout_seconds: How long to wait for the others; the launch's time limit by default.

        Raises:
            MissingRanksError: If some did not call in time, on every rank that did; later comers get it at once.
            RankFailedError: If the process that holds the ranks' store has ended.
            ConfigError: If the process group that this object was made for is no more.

        Collective: every rank of the group.
        """
        self._meet(name, process_group, timeout_seconds)

    def broadcast_object(
        self,
        obj: Any,
        src: int = 0,
        *,
        process_group: ProcessGroup | None = None,
        name: str = "broadcast_object",
        meets: bool = True,
    ) -> Any:
        """Return the ``obj`` of world rank ``src`` on every rank.

        Args:
            obj: Anything that can be pickled.
            src: World rank whose object it is.
            process_group: The ranks that take part.
            name: What the user called; appears in messages.
            meets: Meet first, so that a rank that does not come is named. Needless where ranks have met just before.

        Collective: every rank of the group.
        """
        ranks = self._ranks(process_group)
        if src not in ranks:
            msg = f"`src={src}` takes no part. Use one of {name_ranks(ranks)}."
            raise ConfigError(msg)
        if meets:
            self._meet(name, process_group)
        if len(ranks) == 1:
            return obj
        import torch.distributed as dist

        box = [obj]  # of the other ranks replaced
        dist.broadcast_object_list(box, src=src, group=process_group)
        return box[0]

    def all_gather_object(
        self,
        obj: Any,
        *,
        process_group: ProcessGroup | None = None,
        name: str = "all_gather_object",
        meets: bool = True,
    ) -> list[Any]:
        """Return every rank's ``obj``, in the group's order.

        Args:
            obj: Anything that can be pickled.
            process_group: The ranks that take part.
            name: What the user called; appears in messages.
            meets: As for `broadcast_object`.

        Collective: every rank of the group.
        """
        ranks = self._ranks(process_group)
        if meets:
            self._meet(name, process_group)
        if len(ranks) == 1:
            return [obj]
        import torch.distributed as dist

        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, obj, group=process_group)
        return gathered

    def destroy(self, process_group: ProcessGroup | None = None) -> None:
        """Destroy the group: all groups, by default.

        Collective: every rank of the group.
        """
        if process_group is None:
            close_world()
            return
        import torch.distributed as dist

        dist.destroy_process_group(process_group)

    def _ranks(self, process_group: ProcessGroup | None) -> list[int]:
        """Return the world ranks of a group; of all ranks for ``None``."""
        if process_group is None or self._world.process_group is None:
            return list(range(self.world_size))
        import torch.distributed as dist

        return dist.get_process_group_ranks(process_group)

    def _meet(
        self,
        name: str,
        process_group: ProcessGroup | None,
        timeout_seconds: float | None = None,
        *,
        digest: bytes = b"",
        error: Exception | None = None,
    ) -> bool:
        """Wait for the other ranks, raise their errors unless this one has its own, and return if digests differ."""
        if not self._world.is_current:
            msg = (
                f"`{name}` was called on a coordinator of a process group that is not the present one: it was "
                "destroyed, or launched later. Make a new `DistCoordinator`, and launch before you boost."
            )
            raise ConfigError(msg)
        ranks = self._ranks(process_group)
        if len(ranks) == 1:
            return False
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        meeting = self._world.meeting_of(tuple(ranks))
        # What other threads do, or some ranks only, says nothing of the order of the calls that all make.
        is_noted = len(ranks) == self.world_size and threading.current_thread() is threading.main_thread()
        if is_noted:
            PROGRESS.enter(name)
            PROGRESS.is_waiting = True
        try:
            outcome = meeting.meet(name, digest=digest, error=error, timeout_seconds=timeout_seconds)
        except BaseException:
            if is_noted:
                PROGRESS.leave(name)
            raise
        finally:
            if is_noted:
                PROGRESS.is_waiting = False
        if is_noted:
            PROGRESS.finish(name)
        if outcome.errors and error is None:
            raise _rebuild(outcome.errors)
        return outcome.differs


class Together:
    """Meets the other ranks at the end of a block; see `DistCoordinator.together`."""

    def __init__(
        self,
        coordinator: DistCoordinator,
        name: str,
        process_group: ProcessGroup | None,
        timeout_seconds: float | None,
    ) -> None:
        self._coordinator, self._name = coordinator, name
        self._process_group, self._timeout_seconds = process_group, timeout_seconds
        self._compared: list[tuple[bytes, Callable[[], object]]] = []

    def compare(self, value: Any, *, remedy: str = _SAME, differs: Callable[[], object] | None = None) -> None:
        """Raise on every rank, where the block ends, unless all bring the same value; call it in the block.

        Args:
            value: As `digest` takes it.
            remedy: The end of the message: what to do about a difference.
            differs: Called on every rank where values differ, in place of raising. It may call collectives. Those of
                several values are called in the order in which these were compared.

        Collective: none; ranks compare equally many values, in the same order.
        """
        plain = plain_form(value)
        self._compared.append((digest(plain), differs or functools.partial(self._raise, plain, remedy)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # such as an interrupt: this process ends
        own = b"".join(value for value, _ in self._compared)
        try:
            differs = self._coordinator._meet(  # noqa: SLF001 - the two are one
                self._name,
                self._process_group,
                self._timeout_seconds,
                digest=digest(own) if len(self._compared) > 1 else own,
                error=error,
            )
        except Exception as missing:
            if error is None:
                raise
            # Nearer to the cause than who is missing, which stays visible as its context and itself has no other.
            missing.__context__ = None
            error.__context__ = error.__context__ or missing
            return
        if differs and error is None:
            self._find_differences([value for value, _ in self._compared])

    def _find_differences(self, own: list[bytes]) -> None:
        """Call what belongs to each value that is not the same on all ranks, which have all come."""
        of_ranks = self._gather(own)
        if len(set(map(len, of_ranks))) > 1:
            msg = f"`{self._name}` compares other numbers of values on some ranks: {[*map(len, of_ranks)]}. {_SAME}"
            raise ConfigError(msg)
        for (_, react), *values in zip(self._compared, *of_ranks, strict=True):
            if len(set(values)) > 1:
                react()

    def _raise(self, plain: Any, remedy: str) -> NoReturn:
        ranks = self._coordinator._ranks(self._process_group)  # noqa: SLF001
        msg = f"{describe_differences(self._name, self._gather(plain), ranks)} {remedy}"
        raise ConfigError(msg)

    def _gather(self, value: Any) -> list[Any]:
        gather = self._coordinator.all_gather_object
        return gather(value, process_group=self._process_group, name=self._name, meets=False)


def _rebuild(problems: list[dict[str, Any]]) -> Exception:
    """Return the exception that a rank without an error of its own raises for those of others."""
    first = problems[0]
    text = f"rank {first['rank']}: {first['text'] or first['type']}"
    if len(problems) > 1:
        text += f" ({name_ranks([int(problem['rank']) for problem in problems[1:]])} failed too.)"
    home = {"builtins": builtins, errors.__name__: errors}.get(first["module"])
    kind = getattr(home, first["type"], None)
    failure: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # such as UnicodeDecodeError, which takes five arguments
            failure = kind(text)
    if failure is None:
        failure = RankFailedError(f"rank {first['rank']}: {first['type']}: {first['text']}")
    failure.__cause__ = RankFailedError(f"on rank {first['rank']}:\n{first['traceback'].rstrip()}")
    return failure
