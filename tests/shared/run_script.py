"""Runs a user's script on a reused rank, where only the launch is replaced by the existing process group."""

import runpy
import sys
import warnings
from unittest import mock

import booster_core
from booster_core import DistCoordinator


def run_script(path, plugin, out):
    """Run a script with a plugin's name and a folder as arguments; return the type and message of its error."""
    with (
        mock.patch.object(sys, "argv", [str(path), plugin, str(out)]),
        mock.patch.object(booster_core, "launch_from_torch", return_value=DistCoordinator()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # as in a script
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as error:  # noqa: BLE001 - any error of the script
            return type(error).__name__, str(error)
    return None
