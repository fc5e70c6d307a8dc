"""The ranks of a plan take turns in one process: each is a thread, of which one runs at a time.

A rank runs until it needs what another one has not sent yet; then that one runs. The rank that is asked for runs in the
caller's thread, and most plans need no other.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.ranks import opened_world, set_world
from booster_tools.planning.mail import Mail, Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_core.plugin import Plugin
    from booster_tools.planning.mail import Key
    from booster_tools.planning.prediction import Prediction


class AbandonedError(BaseException):
    """Another rank of the plan has failed; no error of the code that runs, which must not catch it."""


class Relay:
    """Runs ranks until all are planned that the first one needs.

    Args:
        predict: Plans a rank: called with the plugin and the rank's mailbox.
        plugin: One that has boosted nothing; each rank gets a copy.
        rank: The first one.

    Attributes:
        found: What was predicted, by rank.
    """

    def __init__(self, predict: Callable[[Plugin, Mailbox], Prediction], plugin: Plugin, rank: int) -> None:
        self.found: dict[int, Prediction] = {}
        self._predict, self._plugin, self._first = predict, plugin, rank
        self._copy = _copied(plugin)
        self._mail = Mail()
        self._needs: dict[int, Key | None] = {rank: None}  # of ranks that are not done
        self._threads: list[threading.Thread] = []
        self._turn = rank
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> dict[int, Prediction]:
        """Return the predictions of all ranks, in ascending order.

        Raises:
            Exception: The first that a rank raised.
        """
        try:
            self._plan(self._plugin, self._first)
            with self._changed:
                self._changed.wait_for(lambda: not self._needs or self._error is not None)
        except AbandonedError:
            pass  # for the error that another rank has left
        except BaseException as error:  # noqa: BLE001 - raised below, when the other ranks have ended
            self._fail(error)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return dict(sorted(self.found.items()))

    def wait_for(self, rank: int, sender: int, key: Key) -> None:
        """Return once something was sent; let other ranks run until then.

        Args:
            rank: The rank that waits, which calls this.
            sender: The rank that has to send it.
            key: What it is.

        Raises:
            AbandonedError: If another rank has failed.
        """
        world = opened_world()
        with self._changed:
            self._needs[rank] = key
            if sender not in self._needs and sender not in self.found:
                self._start(sender)
            self._pass_on()
            self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
            if self._error is not None:
                raise AbandonedError
            self._needs[rank] = None
        set_world(world)

    def _plan(self, plugin: Plugin, rank: int) -> None:
        found = self._predict(plugin, Mailbox(self._mail, rank, self.wait_for))
        with self._changed:
            self.found[rank] = found
            del self._needs[rank]
            self._pass_on()

    def _start(self, rank: int) -> None:
        if isinstance(self._copy, ConfigError):
            raise self._copy
        plugin = copy.deepcopy(self._copy)

        def run() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
                if self._error is not None:
                    return
            try:
                self._plan(plugin, rank)
            except AbandonedError:
                pass  # likewise
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._fail(error)

        self._needs[rank] = None
        self._threads.append(threading.Thread(target=run, name=f"planned rank {rank}", daemon=True))
        self._threads[-1].start()

    def _pass_on(self) -> None:
        """Give the turn to a rank that can go on; the last that came is the nearest to one that waits for nobody."""
        ready = [rank for rank, key in self._needs.items() if key is None or self._mail.has(key)]
        if ready:
            self._turn = ready[-1]
        elif self._needs and self._error is None:
            listed = ", ".join(map(str, sorted(self._needs)))
            self._error = ConfigError(f"Ranks {listed} of the plan wait for each other's messages.")
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def _copied(plugin: Plugin) -> Any:
    """Return a copy of a plugin that has boosted nothing, or the error of a plan that needs one."""
    try:
        return copy.deepcopy(plugin)
    except Exception as error:  # noqa: BLE001 - raised if a copy is needed
        return ConfigError(
            f"Each stage of a pipeline is planned under a copy of plugin '{plugin.name}', and `copy.deepcopy` failed "
            f"with {type(error).__name__}: {error}. Pass options that can be copied."
        )
