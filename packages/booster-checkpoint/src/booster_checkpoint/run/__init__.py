"""Whole training states: steps, manifests, retention, schedulers and random states."""
