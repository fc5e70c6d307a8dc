"""Join the traces of a pipeline's ranks, which hybrid's ``pipeline_record`` writes; print idle shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The file.  [default: RUN/trace.json]")
def command(*, run: Path, out: Path | None) -> None:
    """Put the traces of the ranks in the folder RUN into one file, which Perfetto (ui.perfetto.dev) opens.

    Prints each rank's idle share of the last batch.
    """
    from booster_runtime.trace import read_traces

    events = read_traces(run)
    target = run / "trace.json" if out is None else out
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    click.echo(target)
    for rank, share, seconds in _idle_shares(events):
        click.echo(f"rank {rank}: idle {share:.1%} of {seconds:.4g} s")


def _idle_shares(events: Iterable[dict[str, Any]]) -> Iterator[tuple[int, float, float]]:
    """Yield each rank of a pipeline with its idle share of the last batch that all its ranks ended, and its seconds.

    A batch lasts from its begin on any rank to its end on any.
    """
    slices = [event for event in events if event["ph"] == "X" and "batch" in event["args"]]
    batches = [event for event in slices if "pipeline" in event["args"]]
    for pipeline in sorted({event["args"]["pipeline"] for event in batches}):
        own = [event for event in batches if event["args"]["pipeline"] == pipeline]
        ranks = sorted({event["pid"] for event in own})
        last = min(max(event["args"]["batch"] for event in own if event["pid"] == rank) for rank in ranks)
        whole = [event for event in own if event["args"]["batch"] == last]
        begin, end = min(each["ts"] for each in whole), max(each["ts"] + each["dur"] for each in whole)
        for rank in ranks:
            works = [each for each in slices if each["pid"] == rank and "stage" in each["args"]]
            busy = sum(each["dur"] for each in works if each["args"]["batch"] == last)
            yield rank, 1.0 - busy / (end - begin) if end > begin else 0.0, (end - begin) / 1e6
