"""Parts of a long run, for machines that share it."""

from __future__ import annotations

import pytest


class Shard:
    """Runs one of several equal parts of the tests that are selected: ``--shard 1/8`` runs each eighth test."""

    def __init__(self, text):
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            msg = f"--shard {text}: pass the shard and the number of shards, such as 1/8 or 8/8."
            raise pytest.UsageError(msg)
        self.index, self.count = int(index), int(count)

    @pytest.hookimpl(trylast=True)  # after markers and names have selected the tests
    def pytest_collection_modifyitems(self, config, items):
        others = [item for place, item in enumerate(items) if place % self.count != self.index - 1]
        items[:] = items[self.index - 1 :: self.count]
        config.hook.pytest_deselected(items=others)
