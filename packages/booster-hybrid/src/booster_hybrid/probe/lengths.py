"""Where a layer's code looks at how many positions a rank has: for which lengths a probe of short sequences holds.

A probe compares at one length. A layer that takes another branch beyond 512 positions, or scales what is beyond them,
computes there what the probe has not seen. So while a layer runs on a part of a sequence, the number of its positions
is a `Length`, which tells what it is compared with; and what the layer makes of that number alone, as positions that
it counts, is noted. Batches of other lengths are then held against these facts before layers run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_hybrid.sequence_parallel.layer_code import give_whole_sequences, is_of_the_layer
from booster_hybrid.sequence_parallel.split_list import HIDDEN_STATES
from booster_hybrid.sequence_parallel.stack import Mixers
from booster_hybrid.torch_functions import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor, nn

    from booster_hybrid.sequence_parallel.stack import Argument

MOST_POSITIONS = 128
"""Most positions of the sequences in a probe, but where a layer asks for more."""
Expression = Any
"""A number, `_POSITIONS` for the number of positions, or a tuple of a function, or its name, and of expressions."""
_POSITIONS = "positions"
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ROUNDINGS: dict[str, Callable[[float], int]] = {"ceil": math.ceil, "floor": math.floor, "round": round}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", **_COMPARISONS}


class Condition(NamedTuple):
    """What a layer's code has asked about the number of its positions.

    Args:
        layer: Class of the layer.
        question: What it asked.
        answer: What was so.
    """

    layer: str
    question: Expression
    answer: bool


@dataclass
class Lengths:
    """For which lengths of sequences it is known that the layers of a list compute the same from parts.

    Attributes:
        compared: The lengths at which that was compared.
        compared_others: Those of other sequences that the layers attended to.
        conditions: What has to hold for other lengths, of whole sequences and of each rank's part.
        counts: A layer that makes something of the number of its positions, and what: nothing is known beyond the
            longest length that was compared. ``None`` where none does.
        samples: Number of samples that were compared.
        watched: Classes of layers of which all of that is known.
        unwatched: Those of which a number of positions could not be told from other sizes.
        dims: Along which dimension their arguments are cut.
        left_whole: Lists of layers that no batch has reached, whose sequences stay whole.
        mixers: What is in the layers besides attention.
    """

    compared: set[int] = field(default_factory=set)
    compared_others: set[int] = field(default_factory=set)
    conditions: set[Condition] = field(default_factory=set)
    counts: tuple[str, str] | None = None
    samples: int = 1
    watched: set[str] = field(default_factory=set)
    unwatched: set[str] = field(default_factory=set)
    dims: dict[Argument, int | None] = field(default_factory=dict)
    left_whole: set[str] = field(default_factory=set)
    mixers: Mixers = field(default_factory=Mixers)

    def doubt(self, samples: int, length: int, parts: Collection[int]) -> str | None:
        """Return why layers may compute something else from parts of sequences; ``None`` where they don't.

        Args:
            samples: Number of samples.
            length: Number of positions of whole sequences.
            parts: Number of positions of each rank.
        """
        if length in self.compared:
            return None
        if not self.compared or not self.unwatched <= self.watched:
            return f"only sequences of {sorted(self.compared)} positions were compared" if self.compared else "none ran"
        for layer, question, answer in sorted(self.conditions, key=repr):
            # A multiple of the number of positions may be that of all samples.
            factors = {1.0, samples / self.samples if "'mul'" in repr(question) else 1.0}
            known = {each: {bool(_value(question, each * factor)) for factor in factors} for each in (length, *parts)}
            differing = [each for each, answers in known.items() if answers != {answer}]
            if differing:
                return f"a '{layer}' asks whether {_text(question)[1:-1]}, where it has {differing[0]} positions"
        if self.counts is not None and length > max(self.compared):
            layer, what = self.counts
            return f"a '{layer}' {what}, and only sequences of up to {max(self.compared)} positions were compared"
        return None


@contextlib.contextmanager
def told_by_math() -> Iterator[None]:
    """Let the functions of the module `math` tell what they make of the number of positions, in this context."""
    kept = {name: value for name, value in vars(math).items() if isinstance(value, types.BuiltinFunctionType)}

    def call(*args: Any, function: Callable[..., Any], **kwargs: Any) -> Any:
        is_told = not kwargs and any(isinstance(each, _Told) for each in args)
        return _called(function, args) if is_told else function(*args, **kwargs)

    try:
        for name, function in kept.items():
            setattr(math, name, functools.partial(call, function=function))
        yield
    finally:
        for name, function in kept.items():
            setattr(math, name, function)


def _called(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function of numbers; what it returns tells so."""
    watch = next(each.watch for each in args if isinstance(each, _Told))
    value = function(*map(_plain, args))
    told = tuple(each.told if isinstance(each, _Told) else each for each in args)
    return _made(float(value) if isinstance(value, float) else value, (function, *told), watch)


class _Told:
    """A number that was made of the number of positions, and tells what is asked about it.

    Attributes:
        told: How it was made.
        watch: Notes the questions.
    """

    told: Expression
    watch: LengthWatch

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __bool__(self) -> bool:
        return self.watch.ask(("ne", self.told, 0), answer=_plain(self) != 0)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of NumPy; of what follows from its result nothing is known."""
        if method == "__call__" and not kwargs and all(isinstance(each, (int, float)) for each in args):
            made = _called(function, args)
            return _forgotten(made) if isinstance(made, _Told) else made
        return getattr(function, method)(*map(_plain, args), **kwargs)


class Length(_Told, int):
    """Such an integer."""


class _Ratio(_Told, float):
    """Such a fraction."""

    def __int__(self) -> int:
        self.watch.ask(("lt", self.told, 1), answer=_plain(self) < 1)
        return int(_plain(self))

    def __float__(self) -> float:
        return float(_forgotten(self))


def _forgotten(value: _Told) -> Any:
    """Return a number that tells nothing: it is known only where it is the same."""
    value.watch.ask(("eq", value.told, _plain(value)), answer=True)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, _Told):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)  # type: ignore[arg-type]
    return value


def _made(value: Any, told: Expression, watch: LengthWatch) -> Any:
    if type(value) not in (int, float):
        return value
    made: Any = Length(value) if type(value) is int else _Ratio(value)
    made.told, made.watch = told, watch
    return made


def _arithmetic(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def apply(own: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        one, two = (other, own) if is_reflected else (own, other)
        told = tuple(each.told if isinstance(each, _Told) else each for each in (one, two))
        if name in ("floordiv", "mod") and _plain(one) < _plain(two):
            own.watch.ask(("lt", *told), answer=True)  # the quotient is 0 as long as that is so
        return _made(function(_plain(one), _plain(two)), (name, *told), own.watch)

    return apply


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def ask(own: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        told = other.told if isinstance(other, _Told) else other
        return own.watch.ask((name, own.told, told), answer=function(_plain(own), _plain(other)))

    return ask


def _rounding(name: str) -> Callable[[Any], Any]:
    def apply(own: Any) -> Any:
        own.watch.ask(("lt", own.told, 1), answer=_plain(own) < 1)
        return _made(_ROUNDINGS[name](_plain(own)), (name, own.told), own.watch)

    return apply


for _name in _ARITHMETIC:
    setattr(_Told, f"__{_name}__", _arithmetic(_name, is_reflected=False))
    setattr(_Told, f"__r{_name}__", _arithmetic(_name, is_reflected=True))
for _name in _COMPARISONS:
    setattr(_Told, f"__{_name}__", _comparison(_name))
for _name in _ROUNDINGS:
    setattr(_Ratio, f"__{_name}__", _rounding(_name))


def _value(expression: Expression, positions: float) -> Any:
    if isinstance(expression, tuple):
        name, *rest = expression
        function = name if callable(name) else _ROUNDINGS.get(name) or getattr(operator, name)
        return function(*(_value(each, positions) for each in rest))
    return positions if expression == _POSITIONS else expression


def _text(expression: Expression) -> str:
    if not isinstance(expression, tuple):
        return str(expression)
    name, *rest = expression
    if name in _SIGNS and len(rest) > 1:
        return f"({f' {_SIGNS[name]} '.join(map(_text, rest))})"
    return f"{getattr(name, '__name__', name)}({', '.join(map(_text, rest))})"


def is_clear(module: nn.Module, samples: int, positions: int) -> bool:
    """Return whether a number of positions can be told from all other sizes: none is a multiple of it.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        positions: The number.
    """
    sizes = {samples} | {size for each in module.parameters() for size in each.shape if size}
    return positions > 1 and all(size % positions for size in sizes)


class LengthWatch(TorchFunctionMode):
    """Notes what layers ask about the number of their positions while they run on a part of a sequence.

    Args:
        lengths: Where it is noted.

    Attributes:
        here: Number of positions of the layer that ran last.
    """

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        self.lengths = lengths
        self._layer = ""
        self.here = 0
        self._without: dict[int, tuple[Tensor, int]] = {}
        self._given: dict[int, Tensor] = {}

    def run(self, *args: Any, layer: nn.Module, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a layer on this rank's positions.

        Args:
            *args: What it is called with.
            layer: The layer.
            forward: Its forward.
            **kwargs: What it is called with.
        """
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        give_whole_sequences(to_what_follows=False)
        samples, here = (args[0] if args else kwargs[HIDDEN_STATES]).shape[:2]
        self.here = here
        if not is_clear(layer, samples, here):
            self.lengths.unwatched.add(type(layer).__name__)
            return forward(*args, **kwargs)
        self.lengths.samples = samples
        self._layer = type(layer).__name__
        self.lengths.watched.add(self._layer)
        self._without = {}
        self._given = {id(each): each for each in tensors if not each.is_floating_point() and self._has_positions(each)}
        with self, _Constants(self, here):
            return forward(*args, **kwargs)

    def ask(self, question: Expression, *, answer: bool) -> bool:
        """Note a question, and return the answer."""
        self.lengths.conditions.add(Condition(self._layer, question, bool(answer)))
        return bool(answer)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_of_the_layer():
            return result
        if isinstance(result, torch.Size):
            return torch.Size([self._marked(each) for each in result])
        if type(result) is int and name_of(func) in ("size", "numel", "nelement"):
            return self._marked(result)
        given = list(_inside((args, kwargs)))
        inputs = [each for each in given if isinstance(each, torch.Tensor)]
        outputs = [each for each in _inside(result) if isinstance(each, torch.Tensor)]
        with torch.no_grad():
            for each in outputs:
                self._look_at(each, inputs, name_of(func), [each for each in given if isinstance(each, Length)])
        return result

    def _marked(self, size: int) -> Any:
        times = size // self.here
        if type(size) is not int or not times or size % self.here:
            return size
        return _made(size, _POSITIONS if times == 1 else ("mul", _POSITIONS, times), self)

    def _has_positions(self, tensor: Tensor) -> bool:
        return any(size and size % self.here == 0 for size in tensor.shape)

    def _is_without_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made without any of the layer's hidden states, and not filled with them since."""
        known, version = self._without.get(id(tensor), (None, 0))
        return known is tensor and tensor._version == version  # noqa: SLF001

    def _count(self, what: str) -> None:
        self.lengths.counts = self.lengths.counts or (self._layer, what)

    def _look_at(self, output: Tensor, inputs: Sequence[Tensor], function: str, lengths: Sequence[Length]) -> None:
        """Note what a function has made of the number of positions, or of what tells positions, alone."""
        dims = [dim for dim, size in enumerate(output.shape) if size == self.here]
        if lengths and dims and inputs and not any(map(self._has_positions, inputs)):
            own = {each.untyped_storage().data_ptr() for each in inputs}
            if output.untyped_storage().data_ptr() in own and any(output.stride(dim) for dim in dims):
                self._count(f"reads a table by the number of its positions (`{function}`)")
        elif all(map(self._is_without_data, inputs)) or (dims and _is_constant(output)):
            self._without[id(output)] = output, output._version  # noqa: SLF001 - no public way to see a write
            if any(_differs_along(output, dim) for dim in dims):
                self._count(f"counts positions by `{function}`")
        elif any(id(each) in self._given for each in inputs) and all(
            id(each) in self._given or self._is_without_data(each) for each in inputs
        ):
            if self._has_positions(output):
                self._given[id(output)] = output
            else:
                self._count(f"takes what it is given for each position together (`{function}`)")


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks whether there are as many positions as a number of them that an operation is given, as a slice is.

    Args:
        watch: Notes the questions.
        here: Number of positions.
    """

    def __init__(self, watch: LengthWatch, here: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch, self._here = watch, here

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        result = func(*args, **(kwargs or {}))
        if is_of_the_layer() and args and isinstance(args[0], torch.Tensor) and self._is_along_positions(func, *args):
            for each in _numbers_of_elements(func, args):
                if self._here <= abs(each) < sys.maxsize and each not in args[0].shape:
                    self._watch.ask(("gt", _POSITIONS, abs(each)), answer=False)
        return result

    def _is_along_positions(self, func: Any, given: Tensor, *more: Any) -> bool:
        """Return whether an operation works along the dimension of a tensor that is the positions'."""
        names = [each.name for each in func._schema.arguments[1:]]  # noqa: SLF001 - told nowhere else
        named = dict(zip(names, more, strict=False))
        dim = named.get("dim", named.get("dimension"))
        if isinstance(dim, int):
            along = given.shape[dim : dim + 1 or None]  # there is none where the dimension is a new one
        else:
            along = given.shape[::-1][: len(named.get("pad", ())) // 2]
        return any(size and size % self._here == 0 for size in along)


def _numbers_of_elements(function: Any, args: Sequence[Any]) -> Iterator[int]:
    """Yield the arguments of an operation that count elements, as its schema says."""
    for declared, value in zip(function._schema.arguments, args, strict=False):  # noqa: SLF001
        if "int" in str(declared.real_type):  # "number" is a value
            yield from (each for each in _inside(value) if type(each) is int)


def _inside(values: Any) -> Iterator[Any]:
    """Yield what is in containers and slices."""
    if isinstance(values, (list, tuple)):
        for each in values:
            yield from _inside(each)
    elif isinstance(values, dict):
        yield from _inside(list(values.values()))
    elif isinstance(values, slice):
        yield from (values.start, values.stop)
    else:
        yield values


def _is_constant(tensor: Tensor) -> bool:
    flat = tensor.flatten()
    return flat.numel() > 0 and bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _differs_along(tensor: Tensor, dim: int) -> bool:
    return bool((tensor != tensor.narrow(dim, 0, 1)).any())
