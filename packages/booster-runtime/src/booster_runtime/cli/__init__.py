"""Verbs of the ``booster`` command."""
