"""The cases that the default run leaves to `nox -s slow`: they take long, and other tests see most of the same."""

from __future__ import annotations

from pathlib import Path

LONG_RUN = frozenset(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n")) - {""}
"""Names of tests below ``tests/``, as pytest prints them."""
