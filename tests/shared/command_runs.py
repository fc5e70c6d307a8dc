"""Runs of commands in this process, whose two outputs are apart."""

import inspect

from click.testing import CliRunner


def command_runner():
    """Return a runner whose results have ``stdout`` and ``stderr``: click 8.1 mixes the two unless told not to."""
    options = {}
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        options["mix_stderr"] = False
    return CliRunner(**options)
