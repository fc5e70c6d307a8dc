"""Sequence parallelism: the layers of unmodified models work on a part of each sequence."""
