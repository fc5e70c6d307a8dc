"""Names of files and folders that are being written: hidden, and used by one save alone.

What a killed save leaves under such a name is known by it, and cleared away by the next one.
"""

from __future__ import annotations

import re
import secrets

TEMPORARY = ".tmp"
TOKEN_CHARACTERS = 16
"""Length of the hexadecimal text in temporary names that no two saves share."""


def new_token() -> str:
    """Return text that no other save uses."""
    return secrets.token_hex(TOKEN_CHARACTERS // 2)


def temporary_name(name: str, token: str | None = None) -> str:
    """Return the name under which a file or folder is written before it gets its own."""
    return f".{name}.{token or new_token()}{TEMPORARY}"


def temporary_pattern(names: str) -> re.Pattern[str]:
    """Return the pattern of the temporary names of all files whose names match a regular expression."""
    return re.compile(rf"\.({names})\.[0-9a-f]{{{TOKEN_CHARACTERS}}}{re.escape(TEMPORARY)}")
