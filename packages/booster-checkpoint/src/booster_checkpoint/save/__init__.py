"""How a save goes: parts, their layout, the writers, and the commit."""
