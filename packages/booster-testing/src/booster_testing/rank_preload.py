"""Imported by multiprocessing's fork server: imports what workers of `booster_testing.rank_pool` are to share.

A fork starts in milliseconds and shares the memory of the imported modules; a new interpreter imports them for seconds.
The server runs nothing but imports, so no state of a test gets into a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

VARIABLE = "BOOSTER_RANK_PRELOAD"
"""Names the file with the modules and the path to find them by, which is removed when it has been read."""


def _import_all(names: list[str]) -> None:
    import torch
    import torch._dynamo  # every optimizer imports it
    import torch.distributed

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):  # the worker that needs it gets the error
                importlib.import_module(name)


if VARIABLE in os.environ:
    gc.disable()  # nothing that is imported is garbage
    _file = Path(os.environ.pop(VARIABLE))
    _asked = json.loads(_file.read_text())
    _file.unlink()
    sys.path[:] = _asked["path"]
    _import_all(_asked["modules"])
    gc.collect()
    gc.freeze()  # so that the forks' garbage collections leave the shared memory alone
    gc.enable()
