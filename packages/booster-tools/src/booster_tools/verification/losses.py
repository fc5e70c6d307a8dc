"""How a verification computes the loss of a batch: by a criterion, the user's function, or the model itself."""

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

_REMEDY = (
    "Pass a function as `loss` that takes the model and a batch and returns the loss, such as "
    "`verify_objects(..., loss=lambda model, batch: criterion(model(batch['x']), batch['y']))`."
)


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
    def by_criterion(cls, criterion: Callable[[Any, Any], Tensor], *, drops_entries: bool = False) -> Losses:
        """Return losses as ``criterion(outputs, batch)``, which is how pipelines compute them.

        Args:
            criterion: Returns a mean over samples.
            drops_entries: Entries of a batch that the model's forward does not take are for the criterion alone.
        """

        def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            outputs = call_with(model, taken_by(model, batch) if drops_entries else batch)
            return criterion(outputs, batch), outputs

        return cls(forward, criterion)


def losses_of_script(
    plugin: Plugin,
    criterion: Callable[..., Any] | None,
    loss: Callable[[nn.Module, Any], Tensor] | None,
    batch: Any,
) -> Losses:
    """Return how a script computes its loss, as far as that can be known before it does.

    Args:
        plugin: One with stages runs the model itself, and calls the criterion with outputs and batch.
        criterion: What the script passes to `boost`.
        loss: What it says about it.
        batch: Its first batch. Of a pair, such as inputs and targets, the criterion gets the second; of anything else
            all, as in `train_batch`.

    Raises:
        ConfigError: If a function is given for a pipeline. Where the guess is wrong, computing a loss raises it.
    """
    if has_stages(plugin):
        if loss is not None:
            msg = (
                "A pipeline calls the model itself, so that a function `loss(model, batch)` can't be used. Leave it "
                "out, and pass the criterion of `execute_pipeline`."
            )
            raise ConfigError(msg)
        return Losses.by_criterion(criterion or loss_of_outputs, drops_entries=True)
    if loss is not None:
        return Losses(lambda model, batch: (loss(model, batch), None))
    return Losses(explaining(guessed_losses(criterion, batch).forward, "`verify_objects`", _REMEDY))


def guessed_losses(criterion: Callable[..., Any] | None, batch: Any) -> Losses:
    """Return how a loop that calls the model would compute its loss.

    Args:
        criterion: What the script passes to `boost`.
        batch: Its first batch; see `losses_of_script`.
    """
    if criterion is None or not isinstance(batch, (list, tuple)) or len(batch) != 2:
        return Losses.by_criterion(criterion or loss_of_outputs, drops_entries=True)

    def forward(model: nn.Module, pair: Any) -> tuple[Tensor, Any]:
        outputs = model(pair[0])
        return criterion(outputs, pair[1]), outputs

    return Losses(forward)


def explaining(
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]], what: str, remedy: str
) -> Callable[[nn.Module, Any], tuple[Tensor, Any]]:
    """Let a guessed way to compute a loss say what to do where it fails.

    Args:
        forward: As for `Losses`.
        what: Who guessed it.
        remedy: What to do, in a sentence.
    """

    def run(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        try:
            loss, outputs = forward(model, batch)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            msg = f"{what} could not compute a loss as it guessed ({cause}). {remedy}"
            raise ConfigError(msg) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"`{type(loss).__name__}`"
            msg = f"{what} guessed how your script computes its loss, and got {got}. {remedy}"
            raise ConfigError(msg)
        return loss, outputs

    return run


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
