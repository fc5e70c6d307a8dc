"""Find what scripts write into parameters while these are gathered, which would be lost when they are resharded.

Versions tell of operations in place, addresses of ``.data = ...``. What goes through ``.data`` leaves no trace but the
values: only at the end of `ShardedModel.whole_parameters`, each rank compares its own shard with what was gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_zero.engine.bucket import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket


class WriteWatch:
    """Remembers parameters as they were shown, and finds those that are others when they are hidden.

    Args:
        names: The parameters' names, by number.
        set_in_forward: Numbers of parameters that the model's forward sets to themselves, which raises their versions.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], set_in_forward: Container[int] = ()) -> None:
        self._names, self._set_in_forward = names, set_in_forward
        self._found: dict[str, str] = {}
        self._seen: dict[Bucket, list[int]] = {}

    def note_shown(self, bucket: Bucket) -> None:
        """Remember a bucket's parameters, which are here, as they are now."""
        self._seen[bucket] = [each._version for each in bucket.parameters]  # noqa: SLF001 - no public name

    def note_hidden(self, bucket: Bucket) -> None:
        """Compare a bucket's parameters with what was remembered, and forget that."""
        before = self._seen.pop(bucket, None)
        if before is None:
            return
        now = [each._version for each in bucket.parameters]  # noqa: SLF001 - as above
        addresses, expected = bucket.addresses(), bucket.expected_addresses()
        if now == before and addresses == expected:
            return
        for position, (slot, parameter) in enumerate(zip(bucket.plan.slots, bucket.parameters, strict=True)):
            # bitsandbytes' layers give their weights other memory in each forward, with the same values.
            if addresses[position] != expected[position] and not _is_equal(bucket, slot.offset, parameter):
                self._found[self._names[slot.index]] = "was given other memory"
            elif now[position] != before[position] and slot.index not in self._set_in_forward:
                self._found[self._names[slot.index]] = "was changed in place"

    def compare(self, bucket: Bucket) -> None:
        """Compare this rank's shard with its part of the whole values, which are here, as bits: NaN differs from NaN.

        Nothing is compared where the memory moves shards, nor where this rank has all of them: it loses none.
        """
        if bucket.ranks.shard_size == 1 or bucket.memory.moves:
            return
        assert bucket.whole is not None, "asked of parameters that are here"
        low, high = bucket.plan.bounds[bucket.ranks.shard_rank : bucket.ranks.shard_rank + 2]
        bits = INTEGERS[bucket.format.working.itemsize]
        shard, gathered = bucket.own.view(bits), bucket.whole[low:high].view(bits)
        if not torch.equal(shard, gathered):
            for piece in bucket.pieces:
                if not torch.equal(bucket.slice_of(shard, piece), bucket.slice_of(gathered, piece)):
                    self._found.setdefault(self._names[piece.index], "was changed through `.data`")

    def forget(self) -> None:
        """Compare nothing that has been shown so far: shards are about to get other values."""
        self._seen = {}

    def take_found(self) -> dict[str, str]:
        """Return how parameters were changed, by name, since the last call."""
        found, self._found = self._found, {}
        return found


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
