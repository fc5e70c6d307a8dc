"""Run a script that imports torchvision, also where torchvision's own operators can't be loaded.

torchvision's wheels on the package index are built for CUDA, and beside torch for the CPU their compiled operators do
not load: then even the import fails, because it gives shapes to operators (``nms``, ``qnms``) that are not there. Its
models need none of them, so declaring those two is enough to train one.

Usage: ``with_torchvision.py SCRIPT ARGUMENTS``.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchvision-alone"
"""Where the test environment has torchvision: transformers imports it wherever it finds it, which fails here."""


def find_torchvision() -> Path | None:
    """Return the folder of the installed package; also looks in ``FOLDER``."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.find_spec("torchvision")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def declare_missing_operators() -> object:
    """Make ``import torchvision`` work; the result must be kept for as long as the operators are to exist."""
    import torch

    package = find_torchvision()
    try:
        torch.ops.load_library(str(package / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


if __name__ == "__main__":
    kept = declare_missing_operators()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
