"""Libraries that lie in a folder of their own beside the test environment, and how a process gets at them.

torchvision's wheels on the package index are built for CUDA. Beside a torch for the CPU their compiled operators do not
load, and then even the import fails, because it gives shapes to operators that are not there; transformers tries that
import wherever it finds torchvision. The libraries that need torchvision, or would bring another torch, keep it
company: only processes that call `use_libraries_apart` see them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(sys.prefix) / "apart"
"""Where the test environment has them."""

_SHAPED_ON_IMPORT = ("nms", "qnms")
_kept: list[object] = []
"""Declarations of operators, which last as long as the object that made them."""


def use_libraries_apart() -> None:
    """Make the libraries in the folder importable in this process, torchvision among them; harmless when repeated.

    A torchvision that is installed as usual is served too.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    if _kept or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        # The models need no operator of torchvision's own, so declaring those that its import asks for is enough.
        library = torch.library.Library("torchvision", "DEF")
        for name in _SHAPED_ON_IMPORT:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def import_quietly(names: Iterable[str]) -> None:
    """Import modules whose imports warn of things that a test of ours can't change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)


def missing_libraries(names: Iterable[str]) -> list[str]:
    """Return those of some top-level modules that are neither installed nor in the folder; imports nothing."""
    return [name for name in names if not (FOLDER / name).exists() and importlib.util.find_spec(name) is None]
