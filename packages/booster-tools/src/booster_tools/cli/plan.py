"""Predict memory and time under each plugin, and rank them.

The work is in `booster_tools.planning`.
"""

from __future__ import annotations

import re
import sys

import click

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_RATES = {"MBPS": 1e6 / 8, "GBPS": 1e9 / 8, "TBPS": 1e12 / 8, "MB/S": 1e6, "GB/S": 1e9, "TB/S": 1e12}


@click.command()
@click.argument("build", metavar="[FILE:FUNCTION]", required=False)
@click.option("--model", "pretrained", help="Plan this language model of transformers: a Hub id or a folder.")
@click.option("--length", default=4096, show_default=True, help="Tokens of a sample, with --model.")
@click.option(
    "--samples", type=click.IntRange(min=1), help="Samples of the batch, with --model.  [default: one a device]"
)
@click.option("--recompute", is_flag=True, help="Recompute activations in backward, with --model.")
@click.option("--devices", required=True, type=click.IntRange(min=1), help="Number of devices; one rank each.")
@click.option("--memory", required=True, help="Memory of each device, such as 80GiB.")
@click.option("--interconnect", default="400Gbps", show_default=True, help="What each device can send: Gbps or GB/s.")
@click.option("--tflops", default=150.0, show_default=True, help="What each device attains in training.")
@click.option("--plugin", "plugins", multiple=True, help="Compare only this plugin; repeatable.  [default: all]")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An argument of the one plugin.")
@click.option("--batch", default="batch", show_default=True, help="Function of the same file that makes the batch.")
@click.option("--loss", help="Function of the same file: loss(outputs, batch).  [default: the outputs' own loss]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16", "pure-bf16"]),
    help="As for Booster.  [default: by the model]",
)
@click.option("--processes", type=click.IntRange(min=1), help="Plans made at a time.  [default: one for each core]")
@click.option("--json", "as_json", is_flag=True, help="Print the best setting as a file for `booster run --settings`.")
def command(
    *,
    build: str | None,
    pretrained: str | None,
    length: int,
    samples: int | None,
    recompute: bool,
    devices: int,
    memory: str,
    interconnect: str,
    tflops: float,
    plugins: tuple[str, ...],
    options: tuple[str, ...],
    batch: str,
    loss: str | None,
    precision: str | None,
    processes: int | None,
    as_json: bool,
) -> None:
    """Predict memory and communication of a script's training under the installed plugins, and rank them.

    FILE:FUNCTION, such as `train.py:build`, names a function that returns (model, optimizer); others of that file
    return the whole batch and, if need be, compute the loss, as for `booster verify`. `--model` plans a language model
    of transformers with AdamW in its place. The plugins' own code runs on this machine, on tensors without values. The
    exit status is 1 where no setting fits.
    """
    from booster_core.errors import BoosterError
    from booster_core.run_settings import option_value
    from booster_tools.planning import Candidate, Devices, default_processes, plan
    from booster_tools.verification.script import functions_of, language_model

    if options and len(plugins) != 1:
        msg = f"`--option {options[0]}` is an argument of one plugin. Name it, and no other, by `--plugin`."
        raise click.UsageError(msg)
    if (build is None) == (pretrained is None):
        msg = "Name either FILE:FUNCTION or a model, as by `--model meta-llama/Llama-3.1-8B`."
        raise click.UsageError(msg)
    try:
        if pretrained is not None:
            shape = {"length": length, "samples": samples or devices}
            functions = language_model(pretrained, **shape, recomputes=recompute)
        else:
            functions = functions_of(str(build), batch, loss)
        given = dict(map(option_value, options))
        found = plan(
            functions,
            Devices(
                number=devices,
                memory_bytes=int(_parse("memory", memory, _BYTES)),
                interconnect_bytes_per_second=_parse("interconnect", interconnect, _RATES),
                flops_per_second=tflops * 1e12,
            ),
            plugins=plugins or None,
            settings=[Candidate(name=plugins[0], options=given)] if given else None,
            mixed_precision=precision,
            progress=lambda line: click.echo(line, err=True),
            num_processes=processes or default_processes(),
        )
    except (BoosterError, TypeError) as error:
        click.echo(f"booster plan: {error}", err=True)
        sys.exit(2)
    click.echo(str(found), err=as_json)
    if found.best is None:
        is_planned = any(each.prediction is not None or each.is_too_large for each in found.settings)
        advice = "No setting fits. Use more devices, a smaller batch, or activation checkpointing."
        click.echo(advice if is_planned else "No setting could be planned, for the reasons above.", err=as_json)
        sys.exit(1)
    click.echo(found.best.candidate.settings(precision).to_json() if as_json else f"\n{found.code}")


def _parse(option: str, text: str, units: dict[str, float] | dict[str, int]) -> float:
    from booster_core.errors import ConfigError

    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z/]+)\s*", text)
    factor = None if match is None else units.get(match[2].upper())
    try:
        if match is None or factor is None:
            raise ValueError
        return float(match[1]) * factor
    except ValueError:
        known = {"memory": "80GiB or 80GB", "interconnect": "400Gbps or 50GB/s"}[option]
        msg = f"`--{option} {text}` is not a number with a unit, such as {known}."
        raise ConfigError(msg) from None
