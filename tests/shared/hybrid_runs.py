"""What tests of the hybrid plugin share: models that it has boosted, stages, and the ways to split sequences."""

import torch
from cases import Setting

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin, ShardingPolicy

ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
SPLIT_GATHER = {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}
MODES = {"all_to_all": ULYSSES, "ring_attn": RING, "split_gather": SPLIT_GATHER}


def boosted(model, **options):
    """Return a Booster with the plugin, the model, and SGD over its parameters.

    Collective: every rank of the world.
    """
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def stages(example, pp_size=2, **options):
    """Return a setting that cuts the list ``layers`` of a model into stages, whose batches are like an example."""
    asked = {"pp_size": pp_size, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": example}
    return Setting(HybridParallelPlugin, {**asked, **options}, pp_size)


def padded_text(seed, length, padding=None):
    """Return four texts, of which the first third and what is padded don't count: more of them in some samples.

    Args:
        seed: Of the tokens.
        length: Number of positions.
        padding: ``"left"`` or ``"right"``; ``None`` for texts without a mask.
    """
    tokens = torch.randint(3, 64, (4, length), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, : length // 3] = -100
    if padding is not None:
        batch["attention_mask"] = torch.ones_like(tokens)
        for sample in range(4):
            hidden = 1 + sample % 3
            unseen = slice(length - hidden, None) if padding == "right" else slice(0, hidden)
            batch["attention_mask"][sample, unseen] = 0
            # Nor what is predicted from what sees nothing.
            batch["labels"][sample, unseen if padding == "right" else slice(0, hidden + 1)] = -100
    return batch
