"""The whole tensors that a save writes, from what each rank owns of them.

Ranks tell each other digests of their lists. Lists that are the same everywhere don't travel, and neither do lists that
are those of the save before. Where ranks own different tensors, lists are merged on their way, so that a rank receives
each tensor's line a few times at most, however many ranks have it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash

from booster_checkpoint.files.frame import TensorSpec
from booster_core.errors import CheckpointError, shorten
from booster_core.state import natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

    from booster_checkpoint.save.parts import OwnedSpec, Part
    from booster_checkpoint.session import Session
    from booster_core.state import TensorShard


@dataclass(frozen=True)
class OwnedTensors:
    """The tensors of a part that this rank owns parts of.

    Args:
        lines: Name, shape and dtype of each, as JSON.
        numels: The number of elements that it owns of each.
    """

    lines: tuple[str, ...]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, part: Part, shards: Iterable[TensorShard]) -> OwnedTensors:
        """Return what this rank owns of a part.

        Args:
            part: The part.
            shards: Its `Part.owned_shards`.

        Raises:
            CheckpointError: If shards of one tensor have different shapes.
        """
        specs: dict[str, tuple[tuple[int, ...], str]] = {}
        numels: dict[str, int] = {}
        for shard in shards:
            key = shard.key
            shape, _ = specs.setdefault(key, (shard.global_shape, str(part.file_dtype(shard)).removeprefix("torch.")))
            if shape != shard.global_shape:
                msg = f"'{key}' has shards of shape {shape} and of shape {shard.global_shape}."
                raise CheckpointError(msg)
            numels[key] = numels.get(key, 0) + shard.numel
        lines = [json.dumps([key, shape, dtype], separators=(",", ":")) for key, (shape, dtype) in specs.items()]
        return cls(tuple(lines), tuple(numels.values()))

    def digests(self) -> tuple[bytes, bytes]:
        """Return a digest of the tensors, and one of what this rank owns of each."""
        return _digest("\n".join(self.lines)), _digest(repr(self.numels))


def _digest(text: str) -> bytes:
    return bytes(xxhash.xxh3_128_digest(text.encode()))


_Told = tuple[bytes, bytes, bytes]
"""What a rank says of its list: digests of the tensors, of what it owns of each, and of all lists that it remembers."""


class SpecTables:
    """Merges the lists of all ranks, and remembers the result until a rank's list is another one.

    Args:
        session: The ranks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, tuple[bytes, list[TensorSpec]]] = {}

    def tell(self, part: Part, owned: OwnedTensors) -> _Told:
        """Return what `merge` needs from every rank."""
        known, _ = self._known.get(part.names.index, (b"", []))
        return (*owned.digests(), known)

    def merge(
        self,
        part: Part,
        owned: OwnedTensors,
        told: Sequence[_Told],
        inside: Sequence[OwnedSpec],
        group: ProcessGroup | None,
    ) -> list[TensorSpec]:
        """Return the whole tensors that all ranks' shards of a part make up, in natural order.

        Args:
            part: The part.
            owned: What this rank owns of it.
            told: What every rank told.
            inside: The tensors inside of the part's values, which all ranks know alike.
            group: The group to communicate in; the default group when ``None``.

        Raises:
            CheckpointError: If a tensor is not owned exactly once, or ranks disagree about its shape or dtype.

        Collective: every rank.
        """
        # What follows is computed from the same values on every rank, and so raises on all of them or on none.
        together = _digest(repr([(tensors, numels) for tensors, numels, _ in told]))
        if any(known != together for _, _, known in told):
            is_alike = len({tensors for tensors, _, _ in told}) == 1
            lines = owned.lines if is_alike else self._session.union(owned.lines, group)
            here = dict(zip(owned.lines, owned.numels, strict=True))
            totals = self._session.total_over_ranks([here.get(line, 0) for line in lines], group)
            entries = zip(json.loads(f"[{','.join(lines)}]"), totals, strict=True)
            specs = _merged((key, tuple(shape), getattr(torch, dtype), n) for (key, shape, dtype), n in entries)
            self._known[part.names.index] = together, specs
        _, specs = self._known[part.names.index]
        if not inside:
            return specs
        return _merged([*((spec.key, spec.shape, spec.dtype, math.prod(spec.shape)) for spec in specs), *inside])


def _merged(owned: Iterable[OwnedSpec]) -> list[TensorSpec]:
    """Return tensors in natural order, once it is known that all of each is there once."""
    specs: dict[str, TensorSpec] = {}
    totals: dict[str, int] = {}
    for key, shape, dtype, numel in owned:
        spec = specs.setdefault(key, TensorSpec(key=key, shape=shape, dtype=dtype))
        if (spec.shape, spec.dtype) != (shape, dtype):
            msg = f"Ranks disagree about '{key}': {spec.shape} of {spec.dtype}, and {shape} of {dtype}."
            raise CheckpointError(msg)
        totals[key] = totals.get(key, 0) + numel
    wrong = [
        f"{key} ({totals[key]} of {math.prod(spec.shape)} elements)"
        for key, spec in specs.items()
        if totals[key] != math.prod(spec.shape)
    ]
    if wrong:
        msg = (
            f"{len(wrong)} tensors are not owned by exactly one rank in each of their parts: {shorten(wrong)}. Are "
            "all ranks saving the same model, under the plugin that boosted it?"
        )
        raise CheckpointError(msg)
    return sorted(specs.values(), key=lambda spec: natural_order(spec.key))
