"""List the installed plugins, what they can do, and why one cannot be loaded.

The listing is read from metadata and source text: it imports neither torch nor any plugin. ``--load`` imports each.
"""

from __future__ import annotations

import dataclasses
import json

import click

from booster_core.errors import PluginError
from booster_core.plugin import discovery


@click.command()
@click.option("--load", "do_load", is_flag=True, help="Import each plugin, to find what its source does not show.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(*, do_load: bool, as_json: bool) -> None:
    """List the installed plugins, what they can do, and why one cannot be loaded.

    Without --load nothing is imported; what only importing would tell is shown as "?". With --load the exit status is 1
    if a plugin cannot be loaded.
    """
    listings = discovery.installed()
    if do_load:
        listings = [_loaded(listing) for listing in listings]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(listing) for listing in listings], indent=2))
    elif listings:
        rows = [("NAME", "CLASS", "DISTRIBUTION", "VERSION", "CAPABILITIES, OR WHY IT CANNOT BE LOADED")]
        rows += [_row(listing) for listing in listings]
        # A cause may be a long path: the last column is not cut or wrapped, so that it can be copied.
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
        for *cells, last in rows:
            click.echo("  ".join([*map(str.ljust, cells, widths), last]))
    else:
        click.echo("No plugin is installed. Run `pip install booster-ddp`.")
    if do_load and any(listing.problem for listing in listings):
        raise SystemExit(1)


def _loaded(listing: discovery.PluginListing) -> discovery.PluginListing:
    """Return the listing with what importing the plugin told."""
    try:
        found = discovery.load(listing.name)
    except PluginError as error:
        return dataclasses.replace(listing, problem=str(error))
    return dataclasses.replace(
        listing,
        class_name=found.__name__,
        capabilities=tuple(sorted(capability.value for capability in found.capabilities)),
        available=found.available,
        problem=None,
    )


def _row(listing: discovery.PluginListing) -> tuple[str, str, str, str, str]:
    if listing.problem is not None:
        last = f"cannot be loaded: {listing.problem}"
    elif not listing.available:
        last = "not available yet: this version has its interface only"
    else:
        last = "?" if listing.capabilities is None else ", ".join(listing.capabilities)
    return (listing.name, listing.class_name or "?", listing.distribution, listing.version, last)
