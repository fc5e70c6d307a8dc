"""Random values for a module that is probed: they show what a model's own hide, and exist for lazy models too."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.layer_plan import ModulePatches
from booster_hybrid.tensor_parallel.split import is_repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torch import Tensor

_SEED = 20191
_PERIOD = 1_000_003
"""Numbers are repeated after this many, a prime, so that no matrix repeats its rows: drawing all would cost more."""
_LARGE = 1 << 16
"""Split matrices with more elements share one buffer, and get no gradient: one that is wrong shows in the input's."""
_SHIFT = 997


class NoValuesError(Exception):
    """A module can't be given random values; the message says why."""


def random_values(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    light: Collection[int],
    left_out: Collection[int] = (),
    shapes: Mapping[int, tuple[int, ...]] | None = None,
) -> dict[int, Tensor]:
    """Return values for the parameters of a module, by their ``id``, alike on ranks with the same kind of device.

    Args:
        module: The module.
        device: Where they are made.
        dtype: Of the values.
        light: Parameters, by ``id``, that may share memory, and then get no gradient, if they are large matrices.
        left_out: Parameters, by ``id``, that keep their values, or what stands in for these, in that dtype.
        shapes: Shapes of values, by ``id``, where they are not the parameters' own.

    Raises:
        NoValuesError: If a parameter holds no floating numbers.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    named = [*module.named_parameters()]
    parameters = {id(parameter): (name, parameter) for name, parameter in named if id(parameter) not in left_out}
    shape_of = {key: torch.Size((shapes or {}).get(key, each.shape)) for key, (_, each) in parameters.items()}
    large = [key for key, shape in shape_of.items() if key in light and len(shape) > 1 and shape.numel() > _LARGE]
    longest = max((shape_of[key].numel() for key in large), default=0)
    buffer = _drawn((longest + _SHIFT * len(large),), device, dtype, generator)
    kept = [parameter for _, parameter in named if id(parameter) in left_out and parameter.is_floating_point()]
    found = {id(each): _as(each.detach(), dtype) for each in kept if each.dtype != dtype}
    for key, (name, parameter) in parameters.items():
        if not parameter.is_floating_point():
            msg = f"its parameter '{name}' is of {parameter.dtype}"
            raise NoValuesError(msg)
        shape = shape_of[key]
        if key in large:
            start = _SHIFT * large.index(key)
            # A window is scaled with the widest matrix, so that one buffer serves all.
            found[key] = buffer[start : start + shape.numel()].view(shape)
            continue
        values = _drawn(shape, device, dtype, generator)
        if len(shape) < 2:
            values = 1 + 0.2 * values  # norms keep their scale
        else:
            values *= shape[-1] ** -0.5
        found[key] = values.requires_grad_()
    if large:
        buffer *= max(shape_of[key][-1] for key in large) ** -0.5
    return found


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a dtype, without memory for what repeats one number."""
    one = values.as_strided((), ()) if is_repeated(values) else values
    return one.to(dtype).expand(values.shape).requires_grad_()


def _drawn(
    shape: tuple[int, ...] | torch.Size, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    number = math.prod(shape)
    values = torch.empty(number, device=device, dtype=dtype)
    values[:_PERIOD].normal_(generator=generator)
    for start in range(_PERIOD, number, _PERIOD):
        values[start : start + _PERIOD] = values[: min(_PERIOD, number - start)]
    return values.view(shape)


@contextlib.contextmanager
def holding(
    module: nn.Module, values: Mapping[int, Tensor], device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Let a module hold other values for its parameters in this context, and copies of its buffers.

    Args:
        module: The module.
        values: By ``id`` of the parameters; others stay.
        device: Where buffers are copied to.
        dtype: Of copies of floating buffers.
    """
    changes = ModulePatches()
    try:
        for each in module.modules():
            for name, parameter in list(each._parameters.items()):  # noqa: SLF001 - `setattr` refuses what is no parameter
                if parameter is not None and id(parameter) in values:
                    changes.entry(each._parameters, name, values[id(parameter)])  # noqa: SLF001
            for name, buffer in list(each._buffers.items()):  # noqa: SLF001 - those that are not saved as well
                if buffer is not None:
                    changes.entry(each._buffers, name, _copied(buffer, device, dtype))  # noqa: SLF001
        yield
    finally:
        changes.undo()


def _copied(buffer: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if is_repeated(buffer) and buffer.is_floating_point():  # a lazy model's, without values yet
        return _drawn(buffer.shape, device, dtype, torch.Generator(device).manual_seed(_SEED)).abs_()
    return buffer.detach().to(device, dtype if buffer.is_floating_point() else buffer.dtype, copy=True)


class ModuleState:
    """The attributes of modules, and what containers among these hold, one level deep.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*modules]
        self._kept = [(vars(each), dict(vars(each))) for each in self._modules]
        self._containers: list[tuple[Any, Any]] = [
            # Most are empty: each module has a dozen of them, for hooks.
            (each, each.copy() if each else ())
            for each in self.values()
            if isinstance(each, (dict, list, set))
        ]

    def now(self) -> ModuleState:
        """Return what the same modules have now."""
        return ModuleState(self._modules)

    def values(self) -> Iterator[Any]:
        """Yield the attributes."""
        for _, values in self._kept:
            yield from values.values()

    def put_back(self) -> None:
        """Let the modules have all of it again."""
        for container, content in itertools.chain(self._kept, self._containers):
            if content:
                _put_back(container, content)
            elif container:
                container.clear()


@contextlib.contextmanager
def restored(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what running a module changes: random states, attributes, what these hold one level deep, buffers.

    Args:
        module: The module.
        device: Whose generator is put back, next to the host's.
    """
    state = ModuleState(module.modules())
    plain = [each for each in state.values() if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)]
    known = [each for each in itertools.chain(plain, module.buffers()) if not is_repeated(each)]
    tensors = [(each, each.detach().clone()) for each in known]
    is_host = device.type == "cpu"
    random = torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)
    try:
        with random, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run may warn of what it lacks here; the first step does again
            yield
    finally:
        state.put_back()
        for tensor, before in tensors:
            if not torch.equal(tensor, before):
                tensor.data = before


def _put_back(container: Any, before: Any) -> None:
    """Put back what was in a list, set or dictionary, where it is not there as it was."""
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, dict):
        has_same_keys = list(container) == list(before)
        if has_same_keys and all(map(operator.is_, container.values(), before.values())):
            return
        if not has_same_keys:
            container.clear()
        for key, value in before.items():  # in place, as somebody may be going through the keys
            if key not in container or container[key] is not value:
                container[key] = value
    elif container != before:
        container.clear()
        container.update(before)
