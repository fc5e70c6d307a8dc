"""Find parameters that somebody has changed while their values were here, which would be forgotten with these.

A parameter without values raises where it is written. While values are here, versions tell of operations in place,
and addresses of ``.data = ...``, at all times. What went through ``.data`` leaves no trace but the values: some are
compared during the first phases, because a model that writes so does it each time, and all of them in debugging.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket

_PHASES = 12
_SAMPLES = 256


class ChangeWatch:
    """Remembers parameters as they were shown, and finds those that are others when they are hidden.

    Args:
        names: The parameters' names, by number.
        is_thorough: Whether to compare all values, and never to stop.
        set_in_forward: Numbers of parameters that the model's forward sets to themselves, which raises their versions.

    Attributes:
        found: How parameters were changed, by name, since `take_found` was last called.
        phases_left: In how many more forwards, backward passes and steps values are compared.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], *, is_thorough: bool, set_in_forward: Container[int] = ()) -> None:
        self.found: dict[str, str] = {}
        self.phases_left: float = math.inf if is_thorough else _PHASES
        self._is_thorough = is_thorough
        self._names, self._set_in_forward = names, set_in_forward
        self._seen: dict[Bucket, _Look] = {}

    def take_found(self) -> dict[str, str]:
        """Return how parameters were changed, by name, since the last call."""
        found, self.found = self.found, {}
        return found

    def take(self, bucket: Bucket) -> None:
        """Remember a bucket's parameters, which are here, as they are now."""
        values = self._values_of(bucket) if self.phases_left else None
        self._seen[bucket] = _Look(_versions(bucket), _addresses(bucket), values)

    def look(self, bucket: Bucket) -> None:
        """Compare a bucket's parameters with what was remembered, and add those that differ to `found`."""
        before = self._seen.pop(bucket, None)
        if before is None:
            return
        addresses, versions = _addresses(bucket), _versions(bucket)
        if addresses != before.addresses:
            # bitsandbytes' layers give their weights other memory in each forward, with the same values.
            self._note(bucket, addresses, before.addresses, "was given other memory", tolerates_equal=True)
        if versions != before.versions:
            self._note(bucket, versions, before.versions, "was changed in place", excepted=self._set_in_forward)
        if before.values is not None and not self.found:
            values = self._values_of(bucket)
            with _disable_current_modes():
                same = [*map(torch.equal, values, before.values)]
            if not all(same):
                self._note(bucket, same, [True] * len(same), "was changed through `.data`")

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
                self.found.setdefault(self._names[slot.index], how)

    def _values_of(self, bucket: Bucket) -> list[Tensor]:
        """Return copies of all values, or some, of each parameter, as bits: NaN differs from itself.

        Modes of the script, such as that of selective activation checkpointing, see none of the operations.
        """
        whole = bucket.whole
        assert whole is not None, "asked of parameters that are here"
        found = []
        with _disable_current_modes():
            for slot in bucket.plan.slots:
                values = whole[slot.offset : slot.offset + slot.numel]
                step = 1 if self._is_thorough else max(slot.numel // _SAMPLES, 1)
                found.append(values[::step].clone().view(torch.uint8))
        return found


class _Look(NamedTuple):
    """What a bucket's parameters were like.

    Args:
        versions: Their versions, which operations in place raise.
        addresses: Where their memory is.
        values: Some or all of their values; ``None`` where these are not compared.
    """

    versions: list[int]
    addresses: list[int]
    values: list[Tensor] | None


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
        f"Parameters were changed by hand, where their values are not kept. {'; '.join(told)}. Change values "
        "with `booster.load_model`, or on every rank inside of `with model.whole_parameters(writes=True)`."
    )
