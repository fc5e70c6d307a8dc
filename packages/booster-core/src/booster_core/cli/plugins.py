"""List the installed plugins, and why one cannot be loaded.

The listing is read from metadata: it imports neither torch nor any plugin. ``--load`` imports each, and shows its class
and capabilities.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from booster_core import discovery
from booster_core.errors import PluginError


@click.command()
@click.option("--load", "do_load", is_flag=True, help="Import each plugin, and show its class and capabilities.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(*, do_load: bool, as_json: bool) -> None:
    """List the installed plugins, and why one cannot be loaded.

    Without --load nothing is imported. With --load the exit status is 1 if a plugin cannot be loaded.
    """
    entries = [dataclasses.asdict(listing) for listing in discovery.installed()]
    if do_load:
        entries = [_loaded(entry) for entry in entries]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    elif entries:
        _print_table([{**entry, "capabilities": ", ".join(entry.get("capabilities") or ())} for entry in entries])
    else:
        click.echo("No plugin is installed. Run `pip install booster-ddp`.")
    if do_load and any(entry["problem"] for entry in entries):
        raise SystemExit(1)


def _loaded(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a plugin's entry with what importing it shows."""
    try:
        found = discovery.load(entry["name"])
    except PluginError as error:
        return {**entry, "class": None, "capabilities": None, "problem": str(error)}
    capabilities = sorted(capability.value for capability in found.capabilities)
    return {**entry, "class": found.__name__, "capabilities": capabilities, "problem": None}


def _print_table(entries: list[dict[str, Any]]) -> None:
    columns = ["name", "distribution", "version", *(["class", "capabilities"] if "class" in entries[0] else [])]
    if any(entry["problem"] for entry in entries):
        columns.append("problem")
    rows = [[column.upper() for column in columns]]
    rows += [[entry[column] or "-" for column in columns] for entry in entries]
    # A cause may be a long path: the last column is not cut or wrapped, so that it can be copied.
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        click.echo("  ".join([*map(str.ljust, cells, widths), last]))
