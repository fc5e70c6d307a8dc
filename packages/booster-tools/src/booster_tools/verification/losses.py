"""How a verification computes the loss of a batch: by a criterion, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from booster_core.errors import ConfigError
from booster_core.plugin import PipelinePlugin
from booster_runtime.data import call_with, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_core.plugin import Plugin


@dataclass(frozen=True)
class Losses:
    """How a training computes its loss.

    Args:
        forward: Called with a model and a batch; returns the loss and the model's outputs, ``None`` for outputs that
            are not known.
        criterion: What a pipeline computes the loss of a microbatch with, from outputs and microbatch; ``None`` where a
            pipeline can't be run.
    """

    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    criterion: Callable[[Any, Any], Tensor] | None = None

    @classmethod
    def by_criterion(cls, criterion: Callable[[Any, Any], Tensor]) -> Losses:
        """Return losses as ``criterion(outputs, batch)``, a mean over samples, which is how pipelines compute them.

        Entries of a batch that the model's forward does not take are for the criterion alone, as in `train_batch`.
        """

        def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            outputs = call_with(model, taken_by(model, batch))
            return criterion(outputs, batch), outputs

        return cls(forward, criterion)


def has_stages(plugin: Plugin) -> bool:
    """Return whether a plugin was configured with a pipeline."""
    config = getattr(plugin, "config", None)
    return isinstance(plugin, PipelinePlugin) and getattr(getattr(config, "pipeline", None), "size", 2) > 1


def loss_of_outputs(outputs: Any, batch: Any) -> Tensor:
    """Return the loss that a model of transformers computes itself.

    Raises:
        ConfigError: If the outputs have no loss.
    """
    del batch
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        msg = (
            f"The model's outputs (`{type(outputs).__name__}`) have no loss, and no criterion was given. For "
            "`verify`, it is `TrainingFunctions(build, batch, loss)`, called as `loss(outputs, batch)`."
        )
        raise ConfigError(msg)
    return loss
