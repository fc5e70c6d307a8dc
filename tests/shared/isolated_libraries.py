"""Libraries in a separate folder of the test environment, and how to import them.

torchvision's wheels on the package index are built for CUDA. With a CPU build of torch their compiled operators can't
be loaded, and then the import fails, because it registers shapes for missing operators; transformers tries that import
if it finds torchvision. torchvision, libraries that need it, and libraries that would install another torch are
therefore in a separate folder: only processes that call `use_isolated_libraries` can import them.
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

FOLDER = Path(sys.prefix) / "isolated_libraries"
"""The folder in the test environment."""

_SHAPED_ON_IMPORT = ("nms", "qnms")
_kept = []
"""Operator declarations, which last as long as the object that made them."""


def use_isolated_libraries():
    """Make the libraries in the folder, including torchvision, importable in this process; may be called repeatedly.

    Also works with a torchvision in the environment itself.
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
        # The models use none of torchvision's operators, so declaring those that its import needs is enough.
        library = torch.library.Library("torchvision", "DEF")
        for name in _SHAPED_ON_IMPORT:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def import_quietly(names):
    """Import modules without the warnings of their imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)


def missing_libraries(names):
    """Return the top-level modules that are neither installed nor in the folder, without importing any."""
    present = {path.name.removesuffix(".py") for path in FOLDER.iterdir()} if FOLDER.exists() else set()
    return [name for name in names if name not in present and importlib.util.find_spec(name) is None]


def emulated(**changes):
    """Return float8 settings with which the CPU computes what a device would; only ranks import torchao."""
    use_isolated_libraries()
    import_quietly(["torchao.float8"])
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, **changes)
