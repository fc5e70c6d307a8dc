"""What ranks must have alike in a step: the settings of an optimizer's groups, and random numbers that it draws.

A learning rate that differs between ranks trains parts of a model, or replicas, by other rules, and nothing shows it.
What is compared are 16 bytes, a digest and its complement, whose largest values over the ranks are complements again
only where all digests are equal. Strategies send them with other flags of a step; the others' are sent by themselves,
and looked at in the step after, so that no rank waits for another.

An optimizer may draw in its step: noise of Langevin dynamics, stochastic rounding and the like. Ranks that see
different samples draw different numbers. Those that step on the same values must not: they would go on with different
models. They draw what the first of them does, as long as the step lasts.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from booster_core.plugin.interface import BoostContext

    _Values = list[list[tuple[tuple[str, Any], ...]]]

_NUM_BYTES = 8  # of XXH3 with 64 bits
_version_of = operator.attrgetter("_version")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_BLOCK_NUMEL = 1 << 22
_NOT_COMPARED = ("params", "param_names")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_REMEDY = (
    "They must be the same on all ranks. Call `scheduler.step()` on each rank, with the mean of the ranks where it "
    "takes a value: `scheduler.step(booster_runtime.reduce(booster, metric))`. Freeze and unfreeze alike on all ranks. "
    "Write the same values to parameters on each rank: load them on all, and draw them by a `generator` that is seeded "
    "alike, as ranks draw different numbers since `boost`. What a first batch sets, set before `boost`. "
    "An optimizer that computes a setting of all gradients in "
    "its step can't step on a part of the parameters: use plugin='ddp'."
)


class GroupSettings:
    """What ranks must have alike in a step: the settings of a model's optimizers, and which parameters are trained.

    Attributes:
        written: By name, digests of the values that a script has written to parameters since the step before; for
            strategies that keep replicas of these, see `find_written`.
    """

    def __init__(self) -> None:
        self.written: Mapping[str, int] = {}
        self._versions: tuple[Mapping[str, nn.Parameter], list[int]] | None = None
        self._values: _Values = []
        self._trained = b""
        self._note = b""
        self._pending: tuple[Callable[[], bytes], _Values, bytes, Mapping[str, int]] | None = None

    def note_versions(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember replicas of parameters as a step has left them; see `find_written`."""
        self._versions = parameters, _versions_of(parameters)

    def find_written(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Find the parameters that a script has written to since the step before, whose values ranks are to compare.

        Layers that are reset in a run (Nikishin et al., The primacy bias in deep reinforcement learning, 2022) draw
        other values on each rank, and a rank that loads alone has others: nothing would make the replicas equal again.
        What goes through ``.data`` is not found, except in the first step, in which all parameters count as written, as
        activation normalization of flows sets them by the first batch (Kingma and Dhariwal, Glow, 2018).

        Args:
            parameters: Those that every rank has whole now.
        """
        of, before = self._versions or (parameters, [])
        now = _versions_of(of)
        self.written = {}
        if before != now:
            pairs = zip_longest(of.items(), before, now)
            changed = {name: each for (name, each), old, new in pairs if old != new and name in parameters}
            sums = [sum_of_bits(each) for each in changed.values()]
            self.written = dict(zip(changed, torch.stack(sums).tolist(), strict=True)) if sums else {}

    def note(self, groups: Sequence[Sequence[Mapping[str, Any]]], trained: bytes) -> bytes:
        """Return the bytes to send.

        Args:
            groups: The parameter groups of each optimizer of a model.
            trained: For each parameter, whether it is trained.
        """
        values = [[tuple(map(_plain, group.items())) for group in of_one] for of_one in groups]
        if values != self._values or trained != self._trained or not self._note:
            self._values, self._trained = values, trained
            self._note = _with_complement(repr(values).encode() + trained)
        return self._note if not self.written else _with_complement(self._note + repr(self.written).encode())

    def check(self, largest: bytes, names: Iterable[str], context: BoostContext) -> None:
        """Raise where ranks have sent different bytes.

        Args:
            largest: The largest of what ranks sent, byte by byte.
            names: Of the parameters.
            context: Of the ``boost``.

        Raises:
            ConfigError: If settings differ; it names them, and which rank has which.

        Collective: every rank of the world, where ranks differ; else none.
        """
        _check(largest, self._values, dict(zip(names, self._trained, strict=True)), context, self.written)

    def exchange(
        self,
        groups: Sequence[Sequence[Mapping[str, Any]]],
        parameters: Mapping[str, nn.Parameter],
        context: BoostContext,
    ) -> None:
        """Check the settings of the step before, and send those of this one.

        Raises:
            ConfigError: As `check`.

        Collective: every rank of the world; none waits for another's present step.
        """
        if context.coordinator.world_size == 1:
            return
        if self._pending is not None:
            received, values, trained, written = self._pending
            self._pending = None
            _check(received(), values, dict(zip(parameters, trained, strict=False)), context, written)
        note = self.note(groups, bytes(parameter.requires_grad for parameter in parameters.values()))
        self._pending = _send(note, context.device), self._values, self._trained, self.written


def _with_complement(told: bytes) -> bytes:
    own = xxhash.xxh3_64_digest(told)
    return own + bytes(255 - byte for byte in own)


def _versions_of(parameters: Mapping[str, nn.Parameter]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - parameters may have a class of their own
        return [*map(_version_of, parameters.values())]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum over a tensor's values, taken as integers of the same size: a scalar where the tensor is.

    Memory: 8 bytes for each element of a block.
    """
    values = tensor.detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).contiguous().view(-1)
    blocks = torch.split(flat.view(_INTEGERS[flat.element_size()]), _BLOCK_NUMEL)
    return torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum()


def _check(
    largest: bytes,
    values: _Values,
    trained: Mapping[str, int],
    context: BoostContext,
    written: Mapping[str, int],
) -> None:
    if all(a + b == 255 for a, b in zip(largest[:_NUM_BYTES], largest[_NUM_BYTES:], strict=True)):
        return
    settings = {
        f"{key} of group {number}" + (f" of optimizer {index}" if len(values) > 1 else ""): value
        for index, groups in enumerate(values)
        for number, group in enumerate(groups)
        for key, value in group
    }
    are_trained = {f"'{name}' is trained": bool(each) for name, each in trained.items()}
    are_written = {f"what was written to '{name}', by digest": number for name, number in written.items()}
    context.coordinator.agree("step", {**settings, **are_trained, **are_written}, remedy=_REMEDY)


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return a setting in a form that can be compared without waiting for a device."""
    key, value = item
    if type(value) in _PLAIN:
        return item
    if key in _NOT_COMPARED:
        return key, None
    if isinstance(value, torch.Tensor):
        return key, float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return key, tuple(_plain(("", each))[1] for each in value)
    return key, value if isinstance(value, (int, float, str)) else type(value).__qualname__


def _send(note: bytes, device: torch.device) -> Callable[[], bytes]:
    """Begin to find the largest bytes of all ranks; return what waits for them.

    Collective: every rank of the world.
    """
    import torch.distributed as dist

    told = torch.tensor(list(note), dtype=torch.uint8)
    if "cpu:" in dist.get_backend_config() or device.type == "cpu":
        work = dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)
        return functools.partial(_wait, work, told)
    on_device = told.pin_memory().to(device, non_blocking=True)
    dist.all_reduce(on_device, dist.ReduceOp.MAX)
    told = torch.empty_like(told, pin_memory=True).copy_(on_device, non_blocking=True)
    event = torch.Event(device)
    event.record()
    return functools.partial(_wait, event, told)


def _wait(pending: Any, told: torch.Tensor) -> bytes:
    pending.synchronize() if hasattr(pending, "record") else pending.wait()
    return bytes(told.tolist())


_States = tuple["Tensor", "Tensor | None"]


class StepDraws:
    """Lets ranks draw alike in the steps of one optimizer, if its first step draws anything."""

    def __init__(self) -> None:
        self._draws: bool | None = None

    @contextlib.contextmanager
    def alike(self, group: ProcessGroup, context: BoostContext) -> Iterator[None]:
        """Let the ranks of a group draw alike in a ``with`` block; afterwards all but the first go on with their own.

        Args:
            group: The ranks that step on the same values.
            context: Of the ``boost``.

        Raises:
            ConfigError: If the optimizer draws numbers in a later step that drew none in its first.

        Collective: the group, unless the first step has drawn nothing.
        """
        import torch.distributed as dist

        device = context.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield  # what a graph draws is the graph's
            return
        own = _states(device)
        if self._draws is False:
            yield
            if not _are_same(own, _states(device)):
                msg = (
                    "The optimizer has drawn random numbers in a step, and drew none in its first: ranks that hold the "
                    "same parameters have drawn different ones. Let its first step draw, too, or use a generator of "
                    "its own that is seeded alike on all ranks."
                )
                raise ConfigError(msg)
            return
        first = dist.get_process_group_ranks(group)[0]
        _restore(context.coordinator.broadcast_object(own, first, process_group=group, meets=False), device)
        begin = _states(device)
        try:
            yield
            if self._draws is None:  # not after a step that has raised
                self._draws = not _are_same(begin, _states(device))
        finally:
            if dist.get_rank() != first:
                _restore(own, device)


def _states(device: torch.device) -> _States:
    host = torch.default_generator.get_state()
    return host, None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _restore(states: _States, device: torch.device) -> None:
    host, of_device = states
    torch.default_generator.set_state(host)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)


def _are_same(one: _States, other: _States) -> bool:
    return torch.equal(one[0], other[0]) and (one[1] is None or torch.equal(one[1], other[1]))  # type: ignore[arg-type]
