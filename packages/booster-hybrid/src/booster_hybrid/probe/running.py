"""Running a module on random values, exactly and without dropout, and comparing what two runs give.

Random values show what a module's own hide, and exist for lazy models too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from booster_hybrid.modules import ModulePatches
from booster_hybrid.probe.calls import Call, copied, eager
from booster_hybrid.tensor_parallel.split import is_repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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


_MOST_IN_DOUBLE = 1 << 27
"""Units with more parameters run in fp32."""
_TOLERANCES = {torch.float64: 2e-5, torch.float32: 2e-5}
"""Largest difference, relative to the largest value: what models compute in fp32, and what fp32 rounds."""
_NARROW_TOLERANCE = 0.05
_SMALL = 0.1
"""Tensors with smaller gradients than this part of the largest are measured against it: they may be roundings."""
_OUTPUT_SEED = 20192
_DROPOUTS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Setting:
    """How a module runs.

    Args:
        dtype: Format of parameters and floating inputs.
        is_training: Whether it is in training mode.
    """

    dtype: torch.dtype
    is_training: bool

    @property
    def tolerance(self) -> float:
        """Largest difference, relative to the largest value."""
        return _TOLERANCES.get(self.dtype, _NARROW_TOLERANCE)


def settings_of(module: nn.Module) -> Iterator[Setting]:
    """Yield how to run a module: in training, if that can be, and as exactly as can be.

    Args:
        module: The module.
    """
    parameters = list(module.parameters())
    number = sum(each.numel() for each in parameters)
    exact = [torch.float64] if number <= _MOST_IN_DOUBLE else []
    narrow = {each.dtype for each in parameters if each.is_floating_point()} - {torch.float64, torch.float32}
    for dtype in (*exact, torch.float32, *narrow):
        yield Setting(dtype, is_training=True)
        yield Setting(dtype, is_training=False)


@dataclass(frozen=True)
class Result:
    """What a module gives.

    Args:
        output: Its first floating output: hidden states, or a loss.
        gradients: By the ``id`` of a parameter, or the number of an input.
        others: Its other floating outputs in plain containers.
    """

    output: Tensor
    gradients: Mapping[int, Tensor | None]
    others: Sequence[Tensor] = ()

    def other_that_differs(self, whole: Result, tolerance: float) -> str | None:
        """Return how another output than the first one differs from another result's; ``None`` where none does."""
        for own, wanted in zip(self.others, whole.others, strict=False):
            if own.shape != wanted.shape:
                return f"a tensor of shape {tuple(own.shape)} in place of {tuple(wanted.shape)}"
            scale, difference = _largest(wanted), _difference(own, wanted)
            if not difference <= tolerance * scale:
                return f"a tensor of shape {tuple(own.shape)}, of up to {scale:.3g}, that differs by {difference:.3g}"
        return None

    def differs_from(self, whole: Result, tolerance: float, part_of: Callable[[int, Tensor], Tensor]) -> Difference:
        """Return what is different in another result, taken for the truth; ``None`` where nothing is.

        Args:
            whole: The other one.
            tolerance: Largest difference, relative to the largest value.
            part_of: Returns which part of a whole gradient, of a key, should be here.
        """
        if self.output.shape != whole.output.shape:
            return None, f"it returns shape {tuple(self.output.shape)} in place of {tuple(whole.output.shape)}"
        scale, difference = _largest(whole.output), _difference(self.output, whole.output)
        if not difference <= tolerance * scale:
            return None, f"on random inputs its outputs of up to {scale:.3g} differ by up to {difference:.3g}"
        largest = max((_largest(each) for each in whole.gradients.values() if each is not None), default=0.0)
        for key, wanted in whole.gradients.items():
            own = self.gradients[key]
            if (own is None) != (wanted is None):
                return key, f"has {'no' if own is None else 'a'} gradient"
            if own is None or wanted is None:
                continue
            scale, difference = _largest(wanted), _difference(own, part_of(key, wanted))
            if not difference <= tolerance * max(scale, _SMALL * largest):
                return key, f"of up to {scale:.3g} differs by up to {difference:.3g}"
        return None


Difference = tuple[int | None, str] | None
"""The key of a gradient, or ``None`` for the output, and how it differs."""


class Runner:
    """Runs a module with values of its own for its parameters.

    Args:
        module: The module.
        call: What it is called with.
        setting: How it runs.
        device: Where it runs.
    """

    def __init__(self, module: nn.Module, call: Call, setting: Setting, device: torch.device) -> None:
        self._module, self._setting, self._device = module, setting, device
        self._call = pytree.tree_map_only(torch.Tensor, self._given, call)

    def whole(self, values: Mapping[int, Tensor]) -> Result | None:
        """Return what the module gives; ``None`` where it gives something else each time, or no numbers.

        Args:
            values: Those of its parameters, by ``id``.
        """
        result, again = self.run(values), self.output(values)
        bound = self._setting.tolerance * _largest(result.output)
        is_same = again.shape == result.output.shape and _difference(again, result.output) <= bound
        return result if is_same and bool(torch.isfinite(result.output).all()) else None

    def output(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return what the module gives, without gradients.

        Args:
            values: Those of its parameters, by ``id``.
        """
        with torch.no_grad():
            output: Tensor = self._output(values, self._inputs()[0])
        return output

    def run(self, values: Mapping[int, Tensor]) -> Result:
        """Return what the module gives.

        Args:
            values: Those of its parameters, by ``id``.
        """
        call, wanted = self._inputs()
        leaves = {key: each for key, each in values.items() if each.requires_grad}
        with torch.enable_grad():
            result: Result = self._output(values, call, (wanted, leaves))
        return result

    def _given(self, value: Tensor) -> Tensor:
        """Return an argument where the unit runs, in its format."""
        dtype = self._setting.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(self._device, dtype).requires_grad_(value.requires_grad)

    def _inputs(self) -> tuple[Call, list[Tensor]]:
        """Return a copy of the call, and those of its tensors that need gradients: the first one, and who had some."""
        flat, form = pytree.tree_flatten(copied(self._call))
        floats = [each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()]
        for each in floats[:1]:
            each.requires_grad_()
        wanted = [each for each in floats if each.requires_grad]
        return pytree.tree_unflatten(flat, form), wanted

    def _output(self, values: Mapping[int, Tensor], call: Call, leaves: Any = None) -> Any:
        """Return the unit's first floating output, or with leaves what it gives altogether."""
        args, kwargs = call
        changes = ModulePatches()
        for each in self._module.modules():
            changes.attribute(each, "training", value=self._setting.is_training)
        try:
            with (
                holding(self._module, values, self._device, self._setting.dtype),
                WithoutDropout(self._setting.dtype),
                torch.autocast(self._device.type, enabled=False),
                eager(),
            ):
                output = self._module(*args, **kwargs)
                first = _first(output)
                others = [each.detach() for each in _floats(output) if each is not first]
                return first if leaves is None else _with_gradients(first, others, *leaves)
        finally:
            changes.undo()


def _with_gradients(
    output: Tensor, others: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Mapping[int, Tensor]
) -> Result:
    generator = torch.Generator(output.device).manual_seed(_OUTPUT_SEED)
    # In the order of the indices, whatever memory format the output has.
    weights = torch.empty(output.shape, dtype=output.dtype, device=output.device).normal_(generator=generator)
    keys = [*range(len(inputs)), *leaves]
    gradients = torch.autograd.grad(output, [*inputs, *leaves.values()], weights, allow_unused=True)
    return Result(output.detach(), dict(zip(keys, gradients, strict=True)), others)


def _first(output: Any) -> Tensor:
    """Return the hidden states, or the loss, of what a module returns."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    msg = "it returns no floating tensor"
    raise TypeError(msg)


def _floats(output: Any) -> Iterator[Tensor]:
    """Yield the floating tensors that a module returns, but for those in objects such as caches of keys."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for each in output.values() if isinstance(output, dict) else output:
            yield from _floats(each)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _difference(one: Tensor, other: Tensor) -> float:
    return _largest(one - other) if one.shape == other.shape else float("inf")


class WithoutDropout(TorchFunctionMode):
    """Keeps what dropouts would drop, and lets masks of attention be in the format of its queries.

    In fp64, what a model asks for in fp32 is in fp64 as well: recurrences amplify roundings, by which a gated delta
    net's gradients move by 3e-4 of their largest value, and a fault of that size would be taken for one.

    Args:
        dtype: The format in which the module runs.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._is_exact = dtype == torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and keep what a dropout would drop."""
        del types
        named = kwargs or {}
        if self._is_exact:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = [torch.float64 if each is torch.float32 else each for each in args]
            named = {key: torch.float64 if each is torch.float32 else each for key, each in named.items()}
        if getattr(func, "__name__", "") in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is nn.functional.scaled_dot_product_attention:
            given = (
                dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | named
            )
            mask = given.get("attn_mask")
            if mask is not None and mask.is_floating_point():
                # torch 2.13 reads a mask in fp32 as if it were in the format of queries in fp64.
                given["attn_mask"] = mask.to(given["query"].dtype)
            return func(**{**given, "dropout_p": 0.0})
        return func(*args, **named)
