"""Verbs of the ``booster`` command that this distribution brings."""
