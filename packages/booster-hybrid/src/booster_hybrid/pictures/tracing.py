"""A pipeline's record as a trace: a process for each rank, a track for each of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.pictures import Trace

if TYPE_CHECKING:
    from booster_hybrid.pictures.reading import Pipeline


def trace_of(pipeline: Pipeline) -> Trace:
    """Return all batches of a pipeline, in seconds since the first of them began."""
    trace = Trace()
    origin = min((batch.began for batch in pipeline.batches), default=0.0)
    named: set[int] = set()
    for batch in pipeline.batches:
        offset = batch.began - origin
        for rank in batch.ranks:
            if rank.rank not in named:
                named.add(rank.rank)
                trace.name_process(rank.rank, f"rank {rank.rank}")
            trace.slice(rank.rank, "batches", f"batch {batch.number}", offset, offset + batch.seconds)
            for each in rank.slices:
                trace.slice(
                    rank.rank,
                    f"stage {each.stage}",
                    f"{each.work} {each.microbatch}",
                    offset + each.start,
                    offset + each.stop,
                    {"batch": batch.number, "stage": each.stage, "microbatch": each.microbatch},
                )
    return trace
