"""Print what a launch and a boost cost one rank of thousands, and how soon ranks learn who is missing.

Not one of the benchmarks of ``nox -s bench``: there is no yardstick. `docs/clusters.md` has the result.

One process plays one rank of many. Its store counts requests and answers as if all other ranks had come. Rank 0 is the
last to come, which does the most. Process groups are torch's fake ones: time is what this rank computes, with a small
Llama over data, pipeline, sequence and tensor parallel ranks; others get what rank 0 sends, and no rank raises a flag.
For the ranks that are missing, each of up to 1,024 ranks is a thread, all of one interpreter: times are upper bounds.
Of more, the time is that of the one that looks up who is missing, and the longest pause in which another one does not
look.

Bars: at 1,024 and 16,384 ranks, 5 s and 20 s of a rank's own time, 40 requests to the store; missing ranks named 3 s
and 10 s after the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster
from booster_core.errors import MissingRanksError
from booster_core.ranks import DistCoordinator, Environment, close_world, open_world, this_host
from booster_core.ranks.meeting import Meeting
from booster_core.ranks.store import distinct_names, hosts_of, local_rank_of, meet_at_launch
from booster_hybrid import HybridParallelPlugin
from booster_runtime.sharding import AnyRankFlags

MESHES = {
    16: {"dp": 2, "pp": 2, "sp": 2, "tp": 2},
    64: {"dp": 4, "pp": 2, "sp": 2, "tp": 4},
    1024: {"dp": 8, "pp": 8, "sp": 2, "tp": 8},
    16384: {"dp": 128, "pp": 8, "sp": 2, "tp": 8},
}
SECONDS = {1024: 5.0, 16384: 20.0}
MISSING_SECONDS = {1024: 3.0, 16384: 10.0}
MAX_THREADS = 1024
NUM_REQUESTS = 40
_LIMIT_SECONDS = 4.0
_LONG_SECONDS = 600.0


class CrowdStore(dist.Store):
    """A store that all other ranks have come to; counts this rank's requests.

    Args:
        world_size: Number of ranks.
        is_last: Whether this rank comes to meetings after the others, else before the last one.
    """

    def __init__(self, world_size: int, *, is_last: bool) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self._world_size = world_size
        self._is_last = is_last
        self._inner = dist.HashStore()
        self._host = this_host().to_text().encode()

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self.requests["set"] += 1
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store`."""
        self.requests["get"] += 1
        if key.endswith("settings"):
            return f'{{"world_size": {self._world_size}}}'.encode()
        return self._inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `torch.distributed.Store`."""
        self.requests["multi_get"] += 1
        return [self._host for _ in keys]

    def add(self, key: str, amount: int) -> int:
        """See `torch.distributed.Store`; the others have added themselves to what counts ranks."""
        self.requests["add"] += 1
        if not key.endswith(("/count", "/left")):
            return self._inner.add(key, amount)
        if not self._is_last and key.endswith("/count"):
            self._inner.set(f"{key.removesuffix('count')}done", '{"ok": true, "differs": false}')
        return self._world_size if self._is_last else self._world_size - 1

    def append(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self.requests["append"] += 1
        self._inner.append(key, value)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store`."""
        self.requests["check"] += 1
        return self._inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `torch.distributed.Store`."""
        self.requests["compare_set"] += 1
        return self._inner.compare_set(key, expected, desired)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch looks for a subclass's method by this name
        """See `torch.distributed.Store`."""
        self.requests["delete_key"] += 1
        return self._inner.delete_key(key)

    def has_extended_api(self) -> bool:
        """See `torch.distributed.Store`."""
        return True


class Cost(NamedTuple):
    """What a launch and a boost cost a rank."""

    num_requests: int
    num_groups: int
    seconds: float


def launch_and_boost(rank: int, world_size: int, said: list[object]) -> Cost:
    """Return what a launch without LOCAL_RANK and a boost over a mesh of four axes cost one rank.

    Args:
        rank: The rank; 0 first.
        world_size: Number of ranks.
        said: What rank 0 has sent to all; filled where it is ``rank``.
    """
    store, calls = CrowdStore(world_size, is_last=rank == 0), []
    new_group = dist.new_group
    replayed = iter(said)

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return new_group(*args, **kwargs)

    def send(box: list[object], *args: object, **kwargs: object) -> None:
        del args, kwargs
        if rank == 0:
            said.append(box[0])
        else:
            box[0] = next(replayed)

    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    start = time.process_time()
    meet_at_launch(store, Environment(rank, world_size, None, "localhost", 29500), 60.0, {})
    local_rank = local_rank_of(store, rank)
    if rank == 0:
        distinct_names(hosts_of(store, range(world_size)))
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    open_world(store, **place, backend="fake", timeout_seconds=60.0, generation=0)
    with (
        mock.patch.object(dist, "new_group", counted),
        mock.patch.object(dist, "broadcast_object_list", send),
        mock.patch.object(AnyRankFlags, "wait", lambda self: bytes(self._flags)),
        contextlib.closing(_World()),
    ):
        DistCoordinator().block_all(name="launch")
        sizes = {f"{axis}_size": size for axis, size in MESHES[world_size].items() if axis != "dp"}
        plugin = HybridParallelPlugin(
            **sizes, zero_stage=1, num_microbatches=sizes["pp_size"], sequence_parallelism_mode="all_to_all"
        )
        Booster("cpu", plugin=plugin).boost(model, optimizer)
    return Cost(store.requests.total(), len(calls), time.process_time() - start)


class _World:
    """The process group, to be closed."""

    def close(self) -> None:
        close_world()


def small_llama() -> LlamaForCausalLM:
    """Return a model that can be cut into 8 stages, and whose heads can be split over 16 ranks."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


def seconds_to_name_missing(world_size: int) -> float:
    """Return how long after the time limit the last rank raises an error that names the one that is missing."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    ends: list[float] = []
    gate = threading.Barrier(world_size)

    def run(rank: int) -> None:
        meeting = Meeting(store, rank, ranks)
        gate.wait()
        try:
            meeting.meet("boost", timeout_seconds=_LIMIT_SECONDS)
        except MissingRanksError as error:
            assert f"for rank {world_size - 1} of" in str(error), error  # noqa: PT017 - what is measured
            ends.append(time.perf_counter())

    ranks = range(world_size)
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks[:-1]]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    assert len(ends) == world_size - 1
    return max(ends) - start - _LIMIT_SECONDS


def seconds_to_look_up_missing(world_size: int) -> float:
    """Return the same for more ranks, by what one does that looks them up, and the pauses of the others."""
    store = dist.HashStore()
    store.append("0/came", "".join(f"{rank} " for rank in range(1, world_size - 1)))
    meeting = Meeting(store, 0, range(world_size))
    start = time.perf_counter()
    try:
        meeting.meet("boost", timeout_seconds=_LIMIT_SECONDS)
    except MissingRanksError as error:
        assert f"for rank {world_size - 1} of" in str(error), error  # noqa: PT017 - what is measured
    pause = meeting._pause_after(_LONG_SECONDS)  # noqa: SLF001 - of a wait of any length
    return time.perf_counter() - start - _LIMIT_SECONDS + pause


def main() -> int:
    """Print a table of the page on clusters, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 16384], choices=sorted(MESHES))
    is_met = True
    print("| ranks | requests of the last rank | of another | groups made | own time | missing ranks named after |")
    print("|--:|--:|--:|--:|--:|--:|")
    for world_size in parser.parse_args().ranks:
        said: list[object] = []
        first, other = (launch_and_boost(rank, world_size, said) for rank in (0, world_size - 1))
        look = seconds_to_name_missing if world_size <= MAX_THREADS else seconds_to_look_up_missing
        named = look(world_size)
        print(
            f"| {world_size:,} | {first.num_requests} | {other.num_requests} | {other.num_groups} | "
            f"{max(first.seconds, other.seconds):.2f} s | {named:.1f} s |",
            flush=True,
        )
        is_met &= max(first.num_requests, other.num_requests) <= NUM_REQUESTS
        is_met &= max(first.seconds, other.seconds) <= SECONDS.get(world_size, SECONDS[1024])
        is_met &= named <= MISSING_SECONDS.get(world_size, MISSING_SECONDS[1024])
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
