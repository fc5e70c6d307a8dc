"""The toolkit that strategies are made of: checkpoints, lazy models, collectives, liveness, adapters and averages.

Its sub-packages may change with each minor version; what users call of them they reach through `booster_core`.
"""
