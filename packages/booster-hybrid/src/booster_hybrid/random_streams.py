"""Streams of random numbers, one kind for each axis that splits a model: alike on replicas, different on shards.

What all ranks of a replica compute alike must draw alike, or they diverge; what they share out must draw differently,
or dropout would drop the same elements of each part. `TensorStreams` switches at the borders of split layers,
`SequenceStream` at those of layers whose sequences are split, and `pipeline_stream` gives each stage its own.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_hybrid.tensor_parallel.group import TensorGroup

RandomStates = tuple["Tensor", "Tensor | None"]
"""States of the generators of the host, and of a device where that is another."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANGE = 2**62
"""Numbers from which streams are seeded are below this."""
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


class TensorStreams:
    """One common stream for replicated activations, and one of each tensor parallel rank for split ones.

    A split region begins with a seed of its own, made of a number of the common stream and the rank. Nothing is saved
    or restored: the region's end seeds the common stream from the number that the region began with. What restores the
    generator, as activation checkpointing does, restores all there is.

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
        """Seed the common stream of all ranks."""
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
        _reseed(mixed_seed(number, stream), self._device)


def mixed_seed(number: int, stream: int) -> int:
    """Return a seed of a stream, from a number: splitmix64's finaliser, in the 63 bits that a seed may have.

    Reference: Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = (number + (stream + 1) * _GOLDEN) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1


class SequenceStream:
    """A stream of this rank's own inside of layers whose sequences are split.

    Outside of the layers the ranks are one replica and draw alike. Inside, each draws from a seed made of a number of
    the common stream and the rank. Where nothing was drawn, the generators are left as they were.

    Args:
        rank: This rank's index among those that draw differently.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._saved: tuple[Tensor, Tensor | None] | None = None
        self._apart: tuple[Tensor, Tensor | None] | None = None
        self._num_alike, self._has_drawn_alike = 0, False

    def enter(self, device: torch.device) -> None:
        """Draw from the rank's own stream from now on.

        Args:
            device: Where numbers are drawn, apart from the CPU.
        """
        before = _states(device)
        seed = int(torch.randint(_RANGE, ()))
        self._saved, self._after_draw, self._device = before, _states(device), device
        self._seed, self._num_alike, self._has_drawn_alike, self._apart = seed, 0, False, None
        _reseed(seed ^ (self._rank * _GOLDEN % _RANGE), device)
        self._seeded = _states(device)

    def draw_alike(self) -> None:
        """Draw as the other ranks do until `draw_apart`, inside of `enter` and `leave`: they compute the same there."""
        if self._saved is None:
            return
        self._apart, self._num_alike = _states(self._device), self._num_alike + 1
        _reseed((self._seed + self._num_alike * _GOLDEN) % _RANGE, self._device)
        self._seeded_alike = _states(self._device)

    def draw_apart(self) -> None:
        """Draw from the rank's own stream again."""
        if self._apart is None:
            return
        self._has_drawn_alike = self._has_drawn_alike or not _are_equal(_states(self._device), self._seeded_alike)
        _restore(self._apart, self._device)
        self._apart = None

    def leave(self) -> None:
        """Draw from where the ranks draw alike again; without effect where `enter` was not called."""
        if self._saved is None:
            return
        is_unused = not self._has_drawn_alike and _are_equal(_states(self._device), self._seeded)
        _restore(self._saved if is_unused else self._after_draw, self._device)
        self._saved = None


@contextlib.contextmanager
def pipeline_stream(model: nn.Module, index: int, device: torch.device) -> Iterator[None]:
    """Let a model that trains, and has dropout, draw from a stream of its rank's position in this context.

    Ranks that were seeded alike would drop the same elements in the first layer of each stage, the second, and so on.
    Afterwards the generators are where the ranks had them, so that scripts draw alike on all of them. Layers and
    microbatches draw one after the other; activation checkpointing restores the stream for what it recomputes.

    Args:
        model: The model.
        index: The rank's position in the pipeline.
        device: Where the model computes.

    Collective: none; each rank's generator advances by one number.
    """
    if not model.training or not draws(model):
        yield
        return
    seed = mixed_seed(int(torch.randint(_RANGE, ())), index)
    is_host = device.type == "cpu"
    with torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type):
        _reseed(seed, device)
        yield


def shared_random(group: ProcessGroup, device: torch.device) -> RandomStates:
    """Let the ranks of a group draw from where its first rank is, and return where this one was.

    Args:
        group: The ranks.
        device: Where their models compute.

    Collective: the group.
    """
    own = _states(device)
    _restore(collectives.all_gather_object(own, group)[0], device)
    return own


def restore_random(states: RandomStates, device: torch.device) -> None:
    """Draw from where `shared_random` has found this rank.

    Collective: none.
    """
    _restore(states, device)


def _states(device: torch.device) -> RandomStates:
    host = torch.get_rng_state()
    return host, None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _reseed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _restore(states: RandomStates, device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device).set_rng_state(states[1], device)


def _are_equal(states: RandomStates, others: RandomStates) -> bool:
    return all(
        other is None or (state is not None and torch.equal(state, other))
        for state, other in zip(states, others, strict=True)
    )
