"""Memories and what lies in them: device, host and disk as one list, moves between them, and who asked for what."""
