"""Tools over checkpoints: inspect, convert, and torch's distributed checkpoints."""
