"""One of very many ranks that save together: what it computes, and what the others would send it, without them."""

from __future__ import annotations

import json
import pickle
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.names import MODEL, FileNames
from booster_checkpoint.save.parts import ModelPart
from booster_checkpoint.save.plan import OwnedTensors, SpecTables
from booster_checkpoint.save.save import Saver, _Save
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_core.state import ModelView, TensorShard, full_box

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_TENSORS, NUM_DENSE = 20_000, 2_000
WIDTH = 4


def name_of(index: int) -> str:
    """Return the name of a tensor."""
    return f"model.layers.{index // 200}.mlp.experts.{index % 200}.down_proj.weight"


def own_experts(rank: int, world_size: int) -> range:
    """Return the tensors that no other rank has."""
    count = NUM_TENSORS - NUM_DENSE
    return range(NUM_DENSE + rank * count // world_size, NUM_DENSE + (rank + 1) * count // world_size)


class OneOfManyAdapter(ModelView):
    """An adapter of one of many ranks, each of which has the same share of some of 20,000 tensors, or of all.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        has_experts: It has other tensors of its own.
    """

    def __init__(self, rank: int, world_size: int, *, has_experts: bool) -> None:
        super().__init__(self)
        self._rank, self._world_size = rank, world_size
        self._has_experts = has_experts

    def model_shards(self) -> Iterator[TensorShard]:
        """Yield this rank's shards."""
        shape, part, whole = (self._world_size, WIDTH), torch.empty(1, WIDTH), torch.empty(self._world_size, WIDTH)
        box = ((self._rank, self._rank + 1), (0, WIDTH))
        for index in range(NUM_DENSE if self._has_experts else NUM_TENSORS):
            yield TensorShard(name=name_of(index), global_shape=shape, dtype=torch.float32, box=box, data=part)
        for index in own_experts(self._rank, self._world_size) if self._has_experts else ():
            yield TensorShard(
                name=name_of(index), global_shape=shape, dtype=torch.float32, box=full_box(shape), data=whole
            )


class OneOfMany:
    """A coordinator of the last of many ranks that all say what it says, and counts what they would receive."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = world_size - 1, world_size
        self.received = 0

    def all_gather_object(self, value: Any, **_: Any) -> list[Any]:
        """Return what all ranks say, which is the same."""
        self.received += self.world_size * len(pickle.dumps(value))
        return [value] * self.world_size


class SessionOfMany(Session):
    """A session of such ranks."""

    def _add_up(self, values: torch.Tensor, group: Any) -> None:  # noqa: ARG002 - there is one group
        """Nothing differs that could travel, and every tensor is there as a whole."""
        self.coordinator.received += values.numel() * values.element_size()
        if values.numel():
            values.fill_(self.world_size * WIDTH)

    def _swap(self, content: bytes, to: int, source: int, group: Any) -> bytes:  # noqa: ARG002 - there is one group
        """Return what the rank ``to - self.rank`` before has heard from as many: what they and this one differ in."""
        size = self.world_size
        known, count = content.decode().split("\n"), (to - self.rank) % size
        dense = [line for line in known if int(line.split(".")[2]) < NUM_DENSE // 200]
        experts = [index for rank in range(count) for index in own_experts((source - rank) % size, size)]
        lines = [*dense, *(json.dumps([name_of(i), [size, WIDTH], "float32"], separators=(",", ":")) for i in experts)]
        heard = "\n".join(lines).encode()
        self.coordinator.received += len(heard)
        return heard


class DifferentTables(SpecTables):
    """The tables of ranks whose lists differ."""

    def merge(self, part: Any, owned: Any, told: Any, inside: Any, group: Any) -> Any:
        """Merge the tables of ranks of which each has another list."""
        _, numels, known = told[0]
        told = [(b"%d" % rank, numels, known) for rank in range(len(told))]
        return super().merge(part, owned, told, inside, group)


def planned_on_one_of_many(
    folder: Path, world_size: int, *, has_experts: bool, times: int = 2
) -> list[tuple[Any, int, float]]:
    """Plan a save some times; return the plan, what was received, and the seconds of processor time, of each."""
    coordinator = OneOfMany(world_size)
    session = SessionOfMany(coordinator, timeout_seconds=None)
    adapter = OneOfManyAdapter(coordinator.rank, world_size, has_experts=has_experts)
    part = ModelPart(adapter, FileNames(base=MODEL), max_bytes=1 << 30)
    own = OwnedTensors.of(part, part.owned_shards())  # the adapter's own work is not counted
    values = SimpleNamespace(facts=lambda: [(part.facts(), own)])
    target = target_at(folder)
    save = _Save(call="save", target=target, parts=[part], values=values, texts={}, checksums=False, commit=None)
    saver = Saver(session, 1 << 20)
    if has_experts:
        saver._tables = DifferentTables(session)  # noqa: SLF001 - as ranks with other lists
    found = []
    for _ in range(times):
        coordinator.received, start = 0, time.process_time()
        plan = saver._plan(save)  # noqa: SLF001 - planning alone is measured
        found.append((plan, coordinator.received, time.process_time() - start))
    return found
