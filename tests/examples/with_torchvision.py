"""Run a script that imports torchvision, also where torchvision lies apart and its own operators can't be loaded.

Usage: ``with_torchvision.py SCRIPT ARGUMENTS``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "shared"))
    from apart import use_libraries_apart

    use_libraries_apart()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
