"""Files with numbers that ``select.select`` does not take."""

import contextlib
import fcntl
import resource

FIRST = 1024


@contextlib.contextmanager
def numbered_high(descriptor):
    """Return another descriptor of a file, numbered 1,024 or more; whoever gets it closes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * FIRST, hard)), hard))
    try:
        yield fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
