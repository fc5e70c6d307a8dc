"""Pictures of runs, for verbs of the ``booster`` command: SVG, PNG where a renderer is there, and traces.

Nothing here imports torch.
"""
