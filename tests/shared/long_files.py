"""The test files that take longest, which the parallel run starts first."""

SECONDS: dict[str, int] = {}
"""CPU seconds of the default run by file, rounded; those of fewer than 10 are left out."""
