"""Pipelines of unmodified models: cutting at a layer's call, schedules as lists of actions, and what runs them."""
