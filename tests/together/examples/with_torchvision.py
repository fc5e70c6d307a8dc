"""Run a script that imports torchvision, also from the separate folder and without its compiled operators.

Usage: ``with_torchvision.py SCRIPT ARGUMENTS``.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "shared"))
    from isolated_libraries import use_isolated_libraries

    use_isolated_libraries()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
