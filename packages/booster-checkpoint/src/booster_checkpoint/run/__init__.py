"""Whole training states: steps, manifests, schedulers and random states."""
