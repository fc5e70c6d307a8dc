"""Random numbers under tensor parallelism: alike where activations are alike, different where they are split.

Dropout on an activation that every rank has must drop the same on each, or the replicas part. Dropout inside a split
region (attention probabilities of the heads here, the hidden activations of an MLP) must drop on each rank by itself,
or heads of different ranks share their masks. So one stream of torch's default generator serves what is replicated,
and a split region begins with a seed of its own, made of a number of the common stream and the rank.

Nothing is saved or restored: a region's end seeds the common stream from the number that the region began with.
What restores the generator, as activation checkpointing does, restores all there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANGE = 2**62
_GOLDEN = 0x9E3779B97F4A7C15
"""Weyl's increment of splitmix64, which spreads consecutive numbers over all bits."""


def draws(model: nn.Module) -> bool:
    """Return whether a model drops anything, by its modules or by a number in a configuration.

    Collective: none.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return _drops(model) or any(_has_dropout(config) for config in configs.values())


def _drops(module: nn.Module) -> bool:
    return any(isinstance(each, _DROPOUTS) and each.p > 0 for each in module.modules())


def _has_dropout(config: Any) -> bool:
    fields: dict[str, object] = getattr(config, "__dict__", {})
    return any(
        value > 0 if isinstance(value, float) else hasattr(value, "model_type") and _has_dropout(value)
        for name, value in fields.items()
        if "drop" in name or hasattr(value, "model_type")
    )


class RandomStreams:
    """The streams of random numbers of one model.

    Args:
        group: The tensor parallel ranks.
        device: Where the model computes.
    """

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._number = 0

    def watch(self, model: nn.Module, columns: Iterable[nn.Module], rows: Iterable[nn.Module]) -> None:
        """Switch streams while a model trains.

        Args:
            model: The whole model, whose forward begins by agreeing on the common stream.
            columns: The modules whose outputs are split; what they drop of their inputs, as adapters may, all have.
            rows: The modules whose inputs are, also those that they drop some of.

        Collective: none; the group, in each forward of a model that trains.
        """
        model.register_forward_pre_hook(self._begin)
        for module in columns:
            if _drops(module):
                module.register_forward_pre_hook(self._join)  # a sibling may have been before it
            module.register_forward_hook(self._split)
        for module in rows:
            (module.register_forward_hook if _drops(module) else module.register_forward_pre_hook)(self._join)

    def _begin(self, module: nn.Module, _args: Any) -> None:
        """Let all ranks draw alike, whatever they drew before."""
        if module.training:
            number = torch.randint(_RANGE, ())
            if self._group.rank > 0:
                number.zero_()
            number = number.to(self._device)
            collectives.all_reduce(number, group=self._group.group).wait()
            self._seed(int(number), 0)

    def _split(self, module: nn.Module, _args: Any, _output: Tensor) -> None:
        if module.training and not self._is_apart():
            self._number = int(torch.randint(_RANGE, ()))
            self._seed(self._number, self._group.rank + 1)

    def _join(self, module: nn.Module, *_: Any) -> None:
        if module.training and self._is_apart():
            self._seed(self._number, 0)

    def _is_apart(self) -> bool:
        """Return whether the generator, which others restore at will, is in this rank's own stream."""
        return torch.default_generator.initial_seed() == mixed_seed(self._number, self._group.rank + 1)

    def _seed(self, number: int, stream: int) -> None:
        seed = mixed_seed(number, stream)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)


def mixed_seed(number: int, stream: int) -> int:
    """Return a seed of a stream, from a number: splitmix64's finaliser, in the 63 bits that a seed may have.

    Reference: Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = (number + (stream + 1) * _GOLDEN) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1
