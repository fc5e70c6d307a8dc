"""What a checkpoint of very many tensors and ranks takes besides its values: part of ``checkpoint.py``.

One process plays one rank, whose peers say what it says (``_many_ranks.py``). torch plans on one rank,
which is given as many plans: time is that of reading them, of the whole plan, and of what goes back. On as many ranks
as the bars are of, torch takes half an hour and tens of GiB, so the two are compared on fewer.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path

import torch
from _many_ranks import NUM_TENSORS, WIDTH, name_of, planned_on_one_of_many
from _results import compare
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from booster_checkpoint.files.checksums import Block, block_sizes
from booster_checkpoint.run.manifest import MANIFEST, FileEntry, Manifest
from booster_checkpoint.storage import locate

_RANKS, _RANKS_OF_BOTH = 1024, 16
_MANIFEST_BYTES, _RECEIVED_BYTES, _PLAN_SECONDS, _LINE_BYTES = 5_000_000, 16 << 20, 2.0, 64


def measure(rounds: int) -> None:
    """Print and keep the results."""
    with tempfile.TemporaryDirectory(prefix="booster-bench-") as folder:
        ours = [planned_on_one_of_many(Path(folder), _RANKS, has_experts=True, times=1)[0] for _ in range(rounds)]
        manifest_bytes = _manifest_bytes(Path(folder))
        both = [
            (planned_on_one_of_many(Path(folder), _RANKS_OF_BOTH, has_experts=False, times=1)[0], _planned_by_torch())
            for _ in range(rounds)
        ]
    seconds, received = [each[2] for each in ours], ours[0][1]
    what = f"planning {NUM_TENSORS:,} tensors on {_RANKS:,} ranks"
    compare(f"{what}, processor time", seconds, [_PLAN_SECONDS] * rounds, yardstick="2 s", bar=1.0)
    compare(f"{what}, received by a rank", [received], [_RECEIVED_BYTES], yardstick="16 MiB", bar=1.0, unit="B")
    of_a_line = received / NUM_TENSORS / _RANKS
    compare(f"{what}, a tensor and rank", [of_a_line], [_LINE_BYTES], yardstick="64 bytes", bar=1.0, unit="")
    compare("manifest of a TiB", [manifest_bytes], [_MANIFEST_BYTES], yardstick="5 MB", bar=1.0, unit="B")
    what = f"planning {NUM_TENSORS:,} tensors on {_RANKS_OF_BOTH} ranks"
    times = [each[2] for each, _ in both], [each[0] for _, each in both]
    compare(f"{what}, processor time", *times, yardstick="DCP's first rank", bar=None)
    sizes = [both[0][0][1]], [both[0][1][1]]
    compare(f"{what}, received by a rank", *sizes, yardstick="DCP's first rank", bar=None, unit="B")


def _manifest_bytes(folder: Path) -> int:
    """Return the size of a manifest of a TiB: 1,024 files, each with 16 tensors of 64 MiB."""
    sizes = block_sizes([4096, *[1 << 26] * 16])
    blocks = tuple(Block(size, f"{index:016x}") for index, size in enumerate(sizes))
    entry = FileEntry(nbytes=sum(sizes), blocks=blocks)
    files = {f"model/model-{number:05d}-of-01024.safetensors": entry for number in range(1, 1025)}
    Manifest(step=1, files=files).write(locate(folder))
    return (folder / MANIFEST).stat().st_size


def _planned_by_torch() -> tuple[float, int]:
    """Return the processor time that torch's first rank takes to plan, and how many bytes it is sent."""
    contents = [pickle.dumps(_plan_of(rank)) for rank in range(_RANKS_OF_BOTH)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    start = time.process_time()
    plans, _ = planner.create_global_plan([pickle.loads(content) for content in contents])  # noqa: S301 - made above
    for plan in plans:
        pickle.dumps(plan)
    return time.process_time() - start, sum(map(len, contents))


def _plan_of(rank: int) -> SavePlan:
    """Return what a rank tells torch's first one: its row of each tensor."""
    items, chunk = [], ChunkStorageMetadata(offsets=torch.Size((rank, 0)), sizes=torch.Size((1, WIDTH)))
    for index in range(NUM_TENSORS):
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=torch.Size((_RANKS_OF_BOTH, WIDTH)))
        place = MetadataIndex(name_of(index), chunk.offsets)
        items.append(WriteItem(index=place, type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={name_of(index): (name_of(index),) for index in range(NUM_TENSORS)})
