"""What the lighthouse knows of all groups."""

from __future__ import annotations

import re
import urllib.request

_LIVES = re.compile(r'<li class="heartbeat\s*">\s*(\S+): seen')
_MEMBER = re.compile(r"<b>(\S+)</b>")


def groups_outside(address: str, own_name: str, timeout_seconds: float) -> list[str]:
    """Return the names of groups that live and are not in the last quorum, sorted.

    Only the lighthouse's page for people tells: torchft's clients don't.

    Args:
        address: Of the lighthouse, as a URL.
        own_name: Of this group. Where the page does not show it as one that lives and takes part, as when others have
            met again without it, or if the page is another, nobody knows who is missing, and its name is returned.
        timeout_seconds: How long to wait for an answer.

    Raises:
        OSError: If the lighthouse does not answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address.rstrip('/')}/status", timeout=timeout_seconds) as answer:
        page = answer.read().decode()
    living, members = ({name.partition(":")[0] for name in kind.findall(page)} for kind in (_LIVES, _MEMBER))
    return sorted(living - members) if own_name in living & members else [own_name]
