"""Memories and what is in them: device, host and disk as one list, moves between them, and who asked for what."""
