"""Refuse embeddings that change their table in forward, each rank other rows."""

from __future__ import annotations

from torch import nn

from booster_core.errors import ConfigError


def refuse_renormalized(model: nn.Module) -> None:
    """Check that no embedding renormalizes the rows that it looks up.

    ``max_norm`` writes to these rows in each forward. Ranks look up rows of their own samples, so replicas would
    differ, and a gathered table would lose the change.

    Raises:
        ConfigError: Naming an embedding with ``max_norm``.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            msg = (
                f"Embedding '{name}' has `max_norm={module.max_norm:g}`: each forward changes the rows that this rank "
                "looks up, so that ranks would train different models. Leave `max_norm` out, and normalize the rows "
                "that were looked up, or the whole table after `optimizer.step()`."
            )
            raise ConfigError(msg)
