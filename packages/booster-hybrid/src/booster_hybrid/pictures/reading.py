"""Reading the records of a run's pipelines: the files that `booster_hybrid.pipeline.record.PipelineRecord` writes."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Slice:
    """What a rank did from then to then.

    Args:
        work: Kind of work, as in `booster_hybrid.pipeline.schedule.Work`.
        stage: Number of the stage.
        microbatch: Number of the microbatch.
        start: Seconds since the batch began on its first rank.
        stop: When it was done.
    """

    work: str
    stage: int
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class RankBatch:
    """What a rank did in a batch.

    Args:
        rank: The rank, in the world.
        slices: Its work, in the order of time.
    """

    rank: int
    slices: Sequence[Slice]

    def idle_share(self, seconds: float) -> float:
        """Return which part of a time the rank did not compute."""
        busy = sum(each.stop - each.start for each in self.slices)
        return 1.0 - busy / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Batch:
    """What all ranks of a pipeline did in a batch.

    Args:
        number: Number of the batch, from 0.
        began: When it began on its first rank, in seconds since 1970.
        seconds: How long it took, from its begin on the first rank to its end on the last.
        num_stages: Stages of the model.
        num_microbatches: Parts of the batch.
        ranks: The ranks, in the order of the pipeline.
    """

    number: int
    began: float
    seconds: float
    num_stages: int
    num_microbatches: int
    ranks: Sequence[RankBatch]


@dataclass(frozen=True)
class Pipeline:
    """All batches of a pipeline.

    Args:
        first_rank: Its first rank in the world.
        batches: Those that ended on all ranks.
    """

    first_rank: int
    batches: Sequence[Batch]

    def batch(self, number: int | None) -> Batch:
        """Return a batch by its number; ``None`` is the last.

        Raises:
            ConfigError: If there is none of that number.
        """
        known = {batch.number: batch for batch in self.batches}
        if not known:
            msg = f"No batch ended on all ranks of the pipeline of rank {self.first_rank}."
            raise ConfigError(msg)
        wanted = max(known) if number is None else number
        if wanted not in known:
            msg = (
                f"The pipeline of rank {self.first_rank} has no batch {wanted} in its record; those that ended on all "
                f"ranks: {min(known)} to {max(known)}."
            )
            raise ConfigError(msg)
        return known[wanted]


def read_pipelines(folder: Path) -> list[Pipeline]:
    """Return the pipelines that left records in a folder, in the order of their first ranks.

    A last line that was cut off, as a killed run leaves it, is passed over.

    Raises:
        ConfigError: If there are none, or a file is not such a record.
    """
    files = sorted(folder.glob("pipeline-rank*.jsonl"))
    if not files:
        msg = (
            f"'{folder}' holds no records of a pipeline ('pipeline-rank0.jsonl' and the like). Train with "
            "`HybridParallelPlugin(pipeline_record=FOLDER)`."
        )
        raise ConfigError(msg)
    found: dict[int, list[tuple[int, int, dict[int, dict[str, Any]]]]] = defaultdict(list)
    for file in files:
        try:
            start, *lines = _read_lines(file)
            batches = {line["number"]: line for line in lines}
            found[start["pipeline"]].append((start["index"], start["rank"], batches))
        except (KeyError, TypeError, ValueError) as cause:
            msg = f"'{file}' is not a record of a pipeline: {type(cause).__name__}: {cause}."
            raise ConfigError(msg) from cause
    return [Pipeline(first, _joined(sorted(ranks, key=lambda each: each[0]))) for first, ranks in sorted(found.items())]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what comes after the last line's end was cut off


def _joined(ranks: Sequence[tuple[int, int, dict[int, dict[str, Any]]]]) -> list[Batch]:
    """Return the batches that all ranks have, put together."""
    common = set.intersection(*(set(batches) for _, _, batches in ranks))
    joined = []
    for number in sorted(common):
        lines = [(rank, batches[number]) for _, rank, batches in ranks]
        began = min(line["began"] for _, line in lines)
        first = lines[0][1]
        joined.append(
            Batch(
                number,
                began,
                max(line["began"] - began + line["seconds"] for _, line in lines),
                first["num_stages"],
                first["num_microbatches"],
                [RankBatch(rank, _slices(line, line["began"] - began)) for rank, line in lines],
            )
        )
    return joined


def _slices(line: dict[str, Any], offset: float) -> list[Slice]:
    return [
        Slice(work, stage, microbatch, start + offset, stop + offset)
        for work, stage, microbatch, start, stop in line["actions"]
    ]
