"""Draw what each stage of a pipeline did when, and its idle share, from a run's record.

The record is what ``HybridParallelPlugin(pipeline_record=FOLDER)`` writes.
"""

from __future__ import annotations

from pathlib import Path

import click

from booster_core.errors import BoosterError


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--batch", "number", type=click.IntRange(min=0), help="Which batch to draw.  [default: the last one]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to write.  [default: RUN]")
@click.option("--png", "as_png", is_flag=True, help="Write PNG in addition to SVG.")
def command(*, run: Path, number: int | None, out: Path | None, as_png: bool) -> None:
    """Draw when each rank computed what in a batch, for every pipeline that left a record in the folder RUN.

    Writes pipelineN.svg, N being the pipeline's first rank, and pipelineN.trace.json with all batches, which Perfetto
    (ui.perfetto.dev) and chrome://tracing open; and tells each rank's idle share.
    """
    from booster_hybrid.pictures.drawing import draw
    from booster_hybrid.pictures.reading import read_pipelines
    from booster_hybrid.pictures.tracing import trace_of
    from booster_runtime.pictures import write_png

    folder = run if out is None else out
    try:
        pipelines = read_pipelines(run)
        folder.mkdir(parents=True, exist_ok=True)
        for pipeline in pipelines:
            batch = pipeline.batch(number)
            svg = folder / f"pipeline{pipeline.first_rank}.svg"
            trace = svg.with_suffix(".trace.json")
            picture = draw(batch)
            svg.write_text(picture, encoding="utf-8")
            trace_of(pipeline).write(trace)
            for path in (svg, trace):
                click.echo(str(path))
            if as_png:
                write_png(picture, svg.with_suffix(".png"))
                click.echo(str(svg.with_suffix(".png")))
            for rank in batch.ranks:
                click.echo(f"rank {rank.rank}: idle {rank.idle_share(batch.seconds):.1%} of {batch.seconds:.4g} s")
    except BoosterError as error:
        raise click.ClickException(str(error)) from error
