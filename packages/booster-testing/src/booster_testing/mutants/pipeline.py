"""`ReferencePipelinePlugin`: a pipeline of one stage, which is the whole model, and copies with one fault each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import Capability, ModelWrapper, OptimizerWrapper, PipelinePlugin
from booster_testing.mutants.reference import ReferencePlugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

_NUM_MICROBATCHES = 2


class ReferencePipelinePlugin(ReferencePlugin, PipelinePlugin):
    """Run microbatches through a pipeline whose one stage is the whole model; batches are dicts of tensors."""

    name: ClassVar[str] = "reference pipeline"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = ReferencePlugin.capabilities | {Capability.PIPELINE}

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Mapping[str, Any]:
        """Run forward of all microbatches, then backward, so that an error in between leaves gradients as they were.

        Raises:
            TypeError: If the model is not a boosted one.
            ConfigError: If the loss is not a scalar.
            StopIteration: If no batch is left.

        Collective: every rank of the world.
        """
        if not isinstance(model, ModelWrapper):
            msg = f"`execute_pipeline` needs the model returned by `boost`; got `{type(model).__name__}`."
            raise TypeError(msg)
        batch = self.take(data_iter)
        length = len(next(iter(batch.values())))
        loss, outputs = torch.zeros((), device=next(model.parameters()).device), []
        for microbatch in self.cut(batch):
            output = model(**microbatch)
            value = criterion(output, microbatch)
            if value.dim():
                msg = f"The criterion returns a scalar; got a tensor of shape {tuple(value.shape)}."
                raise ConfigError(msg)
            loss = loss + value * (len(next(iter(microbatch.values()))) / length)
            outputs.append(output.detach())
        if isinstance(optimizer, OptimizerWrapper) and torch.is_grad_enabled():
            optimizer.backward(loss)
        return {
            "loss": loss.detach() if return_loss else None,
            "outputs": self.join(outputs) if return_outputs else None,
        }

    def take(self, data_iter: Iterator[Any]) -> dict[str, Tensor]:
        """Return the next batch."""
        batch: dict[str, Tensor] = next(data_iter)
        return batch

    def cut(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return a batch's microbatches."""
        parts = {name: tensor.tensor_split(_NUM_MICROBATCHES) for name, tensor in batch.items()}
        length = len(next(iter(batch.values())))
        return [{name: part[index] for name, part in parts.items()} for index in range(min(_NUM_MICROBATCHES, length))]

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of the whole batch."""
        return torch.cat(outputs)


class DropsLastMicrobatch(ReferencePipelinePlugin):
    """Trains without a batch's last samples."""

    def cut(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return all microbatches but one."""
        return super().cut(batch)[:1]


class TakesOneBatchAhead(ReferencePipelinePlugin):
    """Takes a batch that it does not train on."""

    def take(self, data_iter: Iterator[Any]) -> dict[str, Tensor]:
        """Return a batch, and take the one after it."""
        batch = super().take(data_iter)
        next(data_iter, None)
        return batch


class ReversesOutputs(ReferencePipelinePlugin):
    """Returns outputs in the order in which backward ends."""

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs, the last microbatch's first."""
        return super().join(outputs[::-1])
