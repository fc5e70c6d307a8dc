"""Write a model or an optimizer again in another format.

The work is in `booster_checkpoint.tools.convert`; torch is imported when it starts.
"""

from __future__ import annotations

import click


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=click.Choice(["safetensors", "bin", "dcp"]), required=True, help="What to write.")
@click.option("--size-per-shard", type=click.IntRange(min=1), default=1024, show_default=True, help="In MiB.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of a model's floating tensors.")
def command(*, source: str, target: str, form: str, size_per_shard: int, dtype: str | None) -> None:
    """Write SOURCE again as TARGET, which must not exist, in another form.

    SOURCE is a file, an index or a folder of any form. TARGET is a file where its name ends like one, else a folder.
    Either may be a URL. A tensor is read in pieces, so that models larger than memory are converted.
    """
    import torch

    from booster_checkpoint.storage import locate
    from booster_checkpoint.tools.convert import convert

    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    written = convert(locate(source), locate(target), form, size_per_shard=size_per_shard, dtype=dtypes[dtype])
    click.echo(f"{target}:")
    for name, nbytes in written.items():
        click.echo(f"  {nbytes:>15,} bytes  {name}")
