"""Verbs of the ``booster`` command that try out machines, plan and verify."""
