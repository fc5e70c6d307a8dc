"""The definition of a zoo model: how to build it, batches, and a loss, all the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Batch = dict[str, Any]
"""Keyword arguments of a model's forward, each with one entry per sample in its first dimension."""


def weighted_outputs(output, _batch):
    """Return a mean over samples of all floating-point outputs, weighted so that no layer's gradient vanishes.

    A mean of squares would not do: behind a layer norm it is constant.
    """
    total = torch.zeros(())
    for tensor in _floats(output):
        weights = torch.sin(torch.arange(tensor[0].numel(), dtype=torch.float32) + 1.0).view(tensor.shape[1:])
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        total = total + (wide * weights).mean()
    return total


def own_loss(output, _batch):
    """Return the loss that the model computes itself from labels."""
    return output.loss


def classified(output, batch):
    """Return the loss of logits of classes."""
    return nn.functional.cross_entropy(output, batch["labels"])


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A tiny model with random weights.

    Args:
        name: Library and name, as in ``"timm/convit_tiny"``.
        build: Returns the model; draws its weights from torch's default generator.
        batch: Draws a number of samples from a generator.
        loss: Computes a scalar from output and batch, whose entries that the model does not take are for it alone.
        needs: Top-level modules that it imports.
        no_effect: Patterns of parameters without effect on the loss, whose gradients are zero except for rounding:
            attention's softmax does not depend on a bias of the keys.
        double: Whether it is trained in fp64, because its gradients are ill-conditioned: batch norm over few values.
        sparse_gradients: Whether it is trained with SGD, because AdamW refuses sparse gradients.
        refused: Patterns of the documented errors under plugins that refuse the model, by plugin.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[Any, Batch], Tensor] = weighted_outputs
    needs: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    double: bool = False
    sparse_gradients: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def seeded(self):
        """Return the model in training mode, equal in every process, with dropout probability 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model = self.build().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.double() if self.double else model

    def loss_of(self, model, batch):
        """Run forward of the plain or boosted model and return the loss."""
        if self.double:
            batch = in_double(batch)
        return self.loss(model(**batch), batch)

    def share(self, step, rank, samples):
        """Return a rank's samples of a step, all different."""
        return self.batch(torch.Generator().manual_seed(1000 * step + rank), samples)

    def whole(self, step, world_size, samples):
        """Return the samples of all ranks of a step."""
        batches = [self.share(step, rank, samples) for rank in range(world_size)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def in_double(batch):
    """Return a batch with its floating-point tensors in fp64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _floats(output):
    """Return the floating-point tensors of an output that require gradients, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad and output.dim() > 0 else []
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in _floats(value)]
