"""Print the packages that a change touches, and those that depend on them, as a JSON list: ``touched.py BASE``.

BASE is the commit that the change is compared with. A commit that is unknown here, as after a forced push, compares
with nothing: every package is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys

from workspace import PACKAGES, ROOT, touched


def changed_files(base: str) -> list[str] | None:
    """Return the files that differ between a commit and the checkout's, or ``None`` if the commit is unknown."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "-z", "--no-renames", f"{base}...HEAD", "--"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return [path for path in done.stdout.split("\0") if path] if done.returncode == 0 else None


def main(base: str) -> None:
    """Print the packages."""
    files = changed_files(base)
    print(json.dumps(PACKAGES if files is None else touched(files)))


if __name__ == "__main__":
    main(sys.argv[1])
