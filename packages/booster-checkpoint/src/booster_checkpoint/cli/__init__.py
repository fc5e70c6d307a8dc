"""Verbs of the ``booster`` command that look at checkpoints."""
