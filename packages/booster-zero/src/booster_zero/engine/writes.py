"""Find what scripts write into parameters while these are gathered, which would be lost when they are resharded.

Versions tell of operations in place, addresses of ``.data = ...``. What goes through ``.data`` leaves no trace but the
values, of which each rank compares its own shard with what was gathered; together these are all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster_core.errors import ConfigError
from booster_runtime.memory import has_values
from booster_zero.engine.bucket import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket

_THROUGH_DATA = "was changed through `.data`"


class WriteWatch:
    """Remembers parameters as they were shown, and finds those that are others when they are hidden.

    Args:
        names: The parameters' names, by number.
        set_in_forward: Numbers of parameters that the model's forward sets to themselves, which raises their versions.

    Values are not compared where the memory moves shards, nor where this rank has all of them: it loses none.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], set_in_forward: Container[int] = ()) -> None:
        self._names, self._set_in_forward = names, set_in_forward
        self._found: dict[str, str] = {}
        self._seen: dict[Bucket, tuple[list[int], list[int]]] = {}
        self._through_data: dict[str, str] = {}
        self._compared: list[tuple[str, Tensor]] = []  # on a device
        self._coming: tuple[list[str], Tensor, torch.Event] | None = None  # on its way to the host

    def note_shown(self, bucket: Bucket) -> None:
        """Remember a bucket's parameters, which are here, as they are now."""
        self._seen[bucket] = (_versions(bucket), _addresses(bucket))

    def note_hidden(self, bucket: Bucket) -> None:
        """Compare a bucket's parameters with what was remembered, and forget that."""
        before = self._seen.pop(bucket, None)
        if before is None:
            return
        versions, addresses = _versions(bucket), _addresses(bucket)
        if addresses != before[1]:
            # bitsandbytes' layers give their weights other memory in each forward, with the same values.
            self._note(bucket, addresses, before[1], "was given other memory", tolerates_equal=True)
        if versions != before[0]:
            self._note(bucket, versions, before[0], "was changed in place", excepted=self._set_in_forward)
        elif bucket.ranks.shard_size > 1 and not bucket.memory.moves and has_values():
            self._compare(bucket)

    def forget(self) -> None:
        """Compare nothing that has been shown so far: shards are about to get other values."""
        self._seen = {}

    def take_found(self) -> dict[str, str]:
        """Return how parameters were changed, by name, since the last call; not what shards tell, each of its part."""
        found, self._found = self._found, {}
        return found

    def take_all(self, *, waits: bool = False) -> dict[str, str]:
        """Return how parameters were changed, by name, also by what this rank's shard tells of.

        Args:
            waits: Wait for the device. Else what it has compared since the last call is told by the next one, or the
                first one after that when the device has come so far.
        """
        for _ in range(1 + waits):
            if self._coming is not None:
                names, flags, event = self._coming
                if not event.query():
                    if not waits:
                        break  # told by a later call
                    event.synchronize()
                told = [name for name, differs in zip(names, flags.tolist(), strict=True) if differs]
                self._through_data.update(dict.fromkeys(told, _THROUGH_DATA))
                self._coming = None
            if self._compared:
                flags = torch.stack([differ for _, differ in self._compared])
                event = torch.Event(flags.device)
                flags = flags.to("cpu", non_blocking=True)
                event.record()
                self._coming, self._compared = ([name for name, _ in self._compared], flags, event), []
        found, self._through_data = {**self._through_data, **self.take_found()}, {}
        return found

    def _compare(self, bucket: Bucket) -> None:
        """Compare this rank's shard with its part of the whole values, as bits: NaN differs from itself."""
        assert bucket.whole is not None, "asked of parameters that are here"
        low, high = bucket.plan.bounds[bucket.ranks.shard_rank : bucket.ranks.shard_rank + 2]
        bits = INTEGERS[bucket.format.working.itemsize]
        with _disable_current_modes():  # that of selective activation checkpointing sees none of it
            shard, gathered = bucket.own.view(bits), bucket.whole[low:high].view(bits)
            if shard.device.type != "cpu":
                names = "' or '".join(self._names[piece.index] for piece in bucket.pieces[:10])
                self._compared.append((names, (shard != gathered).any()))
            elif not torch.equal(shard, gathered):
                for piece in bucket.pieces:
                    if not torch.equal(bucket.slice_of(shard, piece), bucket.slice_of(gathered, piece)):
                        self._through_data[self._names[piece.index]] = _THROUGH_DATA

    def _note(
        self,
        bucket: Bucket,
        now: Sequence[int],
        before: Sequence[int],
        how: str,
        *,
        tolerates_equal: bool = False,
        excepted: Container[int] = (),
    ) -> None:
        for slot, parameter, one, other in zip(bucket.plan.slots, bucket.parameters, now, before, strict=True):
            if one == other or slot.index in excepted:
                continue
            if not (tolerates_equal and _is_equal(bucket, slot.offset, parameter)):
                self._found.setdefault(self._names[slot.index], how)


def _versions(bucket: Bucket) -> list[int]:
    return [parameter._version for parameter in bucket.parameters]  # noqa: SLF001 - there is no public name


def _addresses(bucket: Bucket) -> list[int]:
    return [parameter.data_ptr() for parameter in bucket.parameters]


def _is_equal(bucket: Bucket, offset: int, parameter: Tensor) -> bool:
    assert bucket.whole is not None, "asked of parameters that are here"
    own = bucket.whole[offset : offset + parameter.numel()].view(parameter.shape)
    is_like = (parameter.dtype, parameter.device) == (own.dtype, own.device)
    return not parameter.requires_grad and is_like and torch.equal(parameter.detach(), own)


def changed_error(every: Mapping[int, Mapping[str, str]]) -> ConfigError | None:
    """Return the error for parameters that were changed by hand, given by rank how; ``None`` if there are none."""
    told = [
        f"rank {rank}: " + ", ".join(f"'{name}' {how}" for name, how in [*of_rank.items()][:10])
        for rank, of_rank in every.items()
        if of_rank
    ]
    if not told:
        return None
    return ConfigError(
        f"Parameters were changed by hand, where their values are not kept. {'; '.join(told)}. Change values after "
        "`optimizer.step()`, on every rank inside of `with model.whole_parameters(writes=True):` with the model that "
        "`boost` returned, not in its forward; or with `booster.load_model`."
    )
