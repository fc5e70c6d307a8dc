"""A hook of mkdocs: each page of the site ends with the versions of the packages that it is about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workspace import PACKAGES, project


def versions() -> str:
    """Return the packages with their versions, those of one version together."""
    by_version: dict[str, list[str]] = {}
    for name in PACKAGES:
        by_version.setdefault(project(name)["version"], []).append(name)
    return "; ".join(f"{', '.join(names)} {version}" for version, names in sorted(by_version.items()))


def on_config(config: Any) -> Any:
    """Add the versions to what stands below each page."""
    config.copyright = f"{config.copyright}<br>{versions()}"
    return config
