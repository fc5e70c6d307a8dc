"""One rank of many on one device: the others are not there, and collectives answer at once.

What a step then costs is what a rank of that many does itself: its host's time, its kernels, its memory. Values mean
nothing: a gather repeats this rank's part, and a sum is this rank's own. Torch's fake process group answers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

import booster_core
from booster_core.ranks import Outcome, current_world, open_world
from booster_runtime.collectives import Pending, Transport, made_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from device_runs.cases import Setting
    from torch import Tensor

_BACKEND = "fake_on_device"
_SECONDS = 60.0


class _ByTorch(Transport):
    """Sends what is on the host by torch's collectives, too: no other rank writes to shared memory."""

    def is_by_torch(self, tensor: Tensor) -> bool:
        del tensor
        return self.size > 1

    def reduce_scatter(
        self, source: Tensor | Sequence[tuple[int, Tensor]], bounds: Sequence[int], out: Tensor, **options: Any
    ) -> Pending:
        """Join what a host would send in parts, as devices do."""
        if self.size > 1 and not isinstance(source, torch.Tensor):
            parts, source = source, source[0][1].view(-1)
            if source.numel() < bounds[-1]:
                source = source.new_zeros(bounds[-1])
                for offset, part in parts:
                    source[offset : offset + part.numel()] = part.view(-1)
        return super().reduce_scatter(source, bounds, out, **options)


class _Attended:
    """Meetings to which every rank has come."""

    def meet(self, name: str, **brought: Any) -> Outcome:
        del name, brought
        return Outcome([], differs=False)


class _Summed(dist.Work):
    """An all-reduce that is complete, with its result, which that of torch's fake group lacks, and DDP asks for."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        self._tensors = []
        return future


_recent: deque[_Summed] = deque(maxlen=64)
"""Torch's C++ code keeps an operation, but not the Python object that implements it."""


def _all_reduce(tensors: list[Tensor], *unused: Any) -> Any:
    del unused
    _recent.append(_Summed(tensors))
    return tensors, _recent[-1].boxed()


@contextlib.contextmanager
def one_of_many(setting: Setting, world_size: int) -> Iterator[Setting]:
    """Close this process's world of one rank, and be rank 0 of a larger one.

    Args:
        setting: Of a case with one rank.
        world_size: Number of ranks.

    Yields:
        What the case goes on with.

    Collective: none.
    """
    booster_core.shutdown()
    # Torch's own name for it covers no other devices than those of torch.
    make = fake_pg._create_fake_pg
    dist.Backend.register_backend(_BACKEND, make, extended_api=True, devices=sorted({"cpu", setting.device}))
    key = "CPU" if setting.device == "cpu" else "CUDA" if setting.is_real else "PrivateUse1"
    with made_by(_ByTorch), torch.library._scoped_library("c10d", "IMPL") as kernels, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?is).*overriding a previously registered kernel")
        kernels.impl("allreduce_", _all_reduce, key)
        store = fake_pg.FakeStore()
        place = {"rank": 0, "local_rank": 0, "world_size": world_size}
        open_world(store, **place, backend=_BACKEND, timeout_seconds=_SECONDS, generation=1)  # a fake store can't count
        current_world().meeting_of = lambda _: _Attended()  # type: ignore[method-assign,assignment,return-value]
        yield replace(setting, backend=_BACKEND, world_size=world_size)
        booster_core.shutdown()
