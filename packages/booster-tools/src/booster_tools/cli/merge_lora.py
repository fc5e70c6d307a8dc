"""Merge LoRA adapters into their base model.

peft merges, and transformers reads and writes; this puts them together, with what a folder needs to be served.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_ADAPTERS = "adapter_"
_DTYPES = ("fp32", "bf16", "fp16")


@click.command()
@click.argument("adapters", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--base", help="Folder or Hub id of the base model.  [default: what the adapters name]")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Format of the result.  [default: that of the base]")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest size of a file.")
def command(*, adapters: Path, out: Path, base: str | None, dtype: str | None, max_shard_size: str) -> None:
    """Merge LoRA adapters into their base model.

    ADAPTERS is a folder that `save_lora_as_pretrained` or peft wrote; OUT gets the model, its configuration and
    tokenizer, as `from_pretrained`, vLLM and lm_eval read them. The whole model is held in memory.
    """
    from booster_tools.merging import merge_lora

    if out.exists() and any(out.iterdir()):
        msg = f"'{out}' is not empty. Choose another folder, or remove it."
        raise click.ClickException(msg)
    name, model = merge_lora(adapters, base=base, dtype=dtype)
    model.save_pretrained(out, max_shard_size=max_shard_size)
    for path in sorted(Path(name).glob("*")) if Path(name).is_dir() else ():
        is_weight = path.name.endswith(_WEIGHTS) or path.name.startswith(_ADAPTERS)
        if path.is_file() and not is_weight and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
    if not Path(name).is_dir():
        click.echo(f"The tokenizer of '{name}' is not copied: save it into '{out}' by its `save_pretrained`.")
    click.echo(f"Merged '{adapters}' into '{name}': '{out}', {str(model.dtype).removeprefix('torch.')}.")
