"""Draw what was in which memory during a step of Gemini, from a run's record.

The record is what ``GeminiPlugin(memory_record=FOLDER)`` writes.
"""

from __future__ import annotations

from pathlib import Path

import click

from booster_core.errors import BoosterError


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", "number", type=click.IntRange(min=0), help="Which step to draw.  [default: the last one]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to write.  [default: RUN]")
@click.option("--png", "as_png", is_flag=True, help="Write PNG as well as SVG.")
def command(*, run: Path, number: int | None, out: Path | None, as_png: bool) -> None:
    """Draw what was where at each moment of a step, for every rank that left a record in the folder RUN.

    Writes memory-rankN.svg, and memory-rankN.trace.json with all steps, which Perfetto (ui.perfetto.dev) and
    chrome://tracing open.
    """
    from booster_gemini.pictures.drawing import draw
    from booster_gemini.pictures.reading import read_records
    from booster_gemini.pictures.tracing import trace_of
    from booster_runtime.pictures import write_png

    folder = run if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for record in read_records(run):
            steps = {step.number: step for step in record.steps}
            wanted = max(steps, default=0) if number is None else number
            rank = record.facts.get("rank", 0)
            if wanted not in steps:
                ended = f"0 to {max(steps)}" if steps else "none"
                msg = f"Rank {rank} has no step {wanted} in its record; those that ended: {ended}."
                raise click.ClickException(msg)
            path = folder / f"memory-rank{rank}"
            picture = draw(record, steps[wanted])
            written = [path.with_suffix(".svg"), path.with_suffix(".trace.json")]
            written[0].write_text(picture, encoding="utf-8")
            trace_of(record, record.steps).write(written[1])
            if as_png:
                written.append(path.with_suffix(".png"))
                write_png(picture, written[-1])
            click.echo("\n".join(map(str, written)))
    except BoosterError as error:
        raise click.ClickException(str(error)) from error
