"""The cases that the default run leaves to `nox -s slow`, because they take long and have siblings that it runs."""

from __future__ import annotations

from pathlib import Path

LONG_RUN = frozenset(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n")) - {""}
"""Names of tests below ``tests/``, as pytest prints them."""
