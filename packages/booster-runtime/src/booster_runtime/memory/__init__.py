"""Memories beside RAM and devices in which tensors may lie."""
