"""What tests of the hybrid plugin share: a model that it has boosted, and the ways to split sequences."""

import torch

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin

ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
SPLIT_GATHER = {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}


def boosted(model, **options):
    """Return a Booster with the plugin, the model, and SGD over its parameters.

    Collective: every rank of the world.
    """
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
