"""Ranks that are threads of this process, for unit tests of arithmetic that communicates.

A test puts `ThreadGroup` in the place of a process group, and functions that use `ThreadGroup.exchange` in the place of
collectives. Autograd runs backward on the CPU in the thread that calls it, so backward may communicate as well.
"""

import threading

_SECONDS = 20.0


class ThreadGroup:
    """One rank's view of a group of threads.

    Args:
        rank: This thread's rank.
        size: Number of threads.
        shared: What the threads share.
    """

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared

    def exchange(self, value):
        """Return what each rank passed, in rank order.

        Collective: every rank.
        """
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values


class _Shared:
    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)


def on_threads(size, function):
    """Call a function on each of several ranks at a time, and return the results in rank order.

    Raises:
        Exception: The first that a rank raised by itself; those of ranks that waited for it are left out.
    """
    shared = _Shared(size)
    results = [None] * size
    errors = []

    def work(rank):
        try:
            results[rank] = function(ThreadGroup(rank, size, shared))
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
