"""What modules that a stage does not run would return, and what its own code outside of the layers calls.

Layers and other modules that are not run return absent tensors in the form of what they would return: that of some of
their arguments, or what their forward returns without values. Arguments of calls have names, and tensors in tuples,
lists and dicts paths such as ``"state[0]"``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_hybrid.pipeline.absent import (
    AbsentTensor,
    ActivationMeta,
    absent_like,
    in_trial,
    is_in_trial,
    is_plain,
)
from booster_hybrid.torch_functions import name_of
from booster_runtime.data import fields_of, hides_tensors
from booster_runtime.memory import only_describes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from booster_hybrid.pipeline.absent import ResultForms


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ArgumentNames:
    """What a function calls its arguments.

    Args:
        function: The function whose arguments have names; of a bound method, without the first one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._names = [each.name for each in parameters if each.kind in _POSITIONAL]
        self._index_of = {name: index for index, name in enumerate(self._names)}
        variable = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL]
        self._variable = variable[0] if variable else ""

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names, in the order in which they were given."""
        return {**{self._name(index): value for index, value in enumerate(args)}, **kwargs}

    def get(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of a call that has a name; ``None`` where there is none."""
        index = self._index_of.get(name, len(args))
        return args[index] if index < len(args) else kwargs.get(name)

    def is_first(self, name: str) -> bool:
        """Return whether a name is that of the first positional argument."""
        return self._index_of.get(name) == 0

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors among the arguments of a call, those in containers as well, by path."""
        return {path: leaf for path, leaf in self.leaves(args, kwargs) if isinstance(leaf, torch.Tensor)}

    def at(self, paths: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return those tensors among the arguments of a call that are at some paths."""
        if not all(path.isidentifier() for path in paths):
            found: Mapping[str, Any] = self.tensors(args, kwargs)
        else:
            found = {path: self.get(path, args, kwargs) for path in paths}
        return {path: found[path] for path in paths if isinstance(found.get(path), torch.Tensor)}

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what the arguments of a call consist of, by path."""
        return [leaf for name, value in self.named(args, kwargs).items() for leaf in _leaves(value, name)]

    def _name(self, index: int) -> str:
        if index < len(self._names):
            return self._names[index]
        return f"{self._variable}/{index - len(self._names)}"


def _parts(value: Any, path: str) -> list[tuple[str, Any, Any]] | None:
    """Return path, key and value of what is directly in a container; ``None`` for anything else."""
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", key, each) for key, each in value.items()]
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return [(f"{path}[{index}]", index, each) for index, each in enumerate(value)]
    fields = fields_of(value)
    return None if fields is None else [(f"{path}.{name}", name, each) for name, each in fields.items()]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(value, path)
    if parts is None:
        yield path, value
    for below, _, each in parts or ():
        yield from _leaves(each, below)


class LikeArguments:
    """What a layer that is not run returns: tensors in the forms of some of its arguments, as in the dry run.

    Args:
        form: Nested tuples and lists of paths of arguments: ``None`` for what is no tensor, and the first one's for a
            tensor that is like none.
        has_shapes: Whether each tensor of the output has the shape and dtype of the argument that stands for it.
    """

    def __init__(self, form: Any, *, has_shapes: bool) -> None:
        self._form, self.has_shapes = form, has_shapes

    def other_shapes(self, output: Any, arguments: Mapping[str, Any]) -> tuple[torch.Size, torch.Size] | None:
        """Return the first two shapes, of an argument and of what was like it in the dry run, that differ now."""
        pairs = pairs_of(self._form, output, arguments)
        return next(((one.shape, two.shape) for one, two in pairs if one.shape != two.shape), None)

    @property
    def argument(self) -> str | None:
        """The argument that the whole output is like; ``None`` where the output is a container."""
        return self._form if isinstance(self._form, str) and self._form else None

    @classmethod
    def like(cls, output: Any, arguments: Mapping[str, torch.Tensor]) -> LikeArguments | None:
        """Return what stands for an output: for each tensor the first argument of its shape that is not taken yet.

        Args:
            output: A tensor, or a tuple or list of tensors and others.
            arguments: The tensors among the arguments of the call, by path.

        Returns:
            ``None`` if there is no tensor in it, or only in containers of other classes.
        """
        found: list[bool] = []
        form = _source(output, dict(arguments), found)
        return cls(form, has_shapes=all(found)) if found else None

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the output.

        Args:
            arguments: What the arguments of the call consist of, by path.
        """
        return _filled(self._form, arguments)


def pairs_of(form: Any, output: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors of an output with the arguments that they are like, as far as a form names these."""
    if isinstance(form, (list, tuple)) and isinstance(output, (list, tuple)):
        for each, value in zip(form, output, strict=False):
            yield from pairs_of(each, value, arguments)
    elif isinstance(form, str) and isinstance(output, torch.Tensor) and isinstance(arguments.get(form), torch.Tensor):
        yield arguments[form], output


# Outside of the methods: a nested function that calls itself keeps what it refers to until garbage is collected.
def _source(value: Any, free: dict[str, torch.Tensor], found: list[bool]) -> str | tuple[Any, ...] | list[Any] | None:
    """Return the path of the argument that stands for a value, which is then taken; note whether its shape fits."""
    if type(value) in (list, tuple):
        return type(value)(_source(each, free, found) for each in value)  # type: ignore[no-any-return]
    if not isinstance(value, torch.Tensor):
        return None
    fits = [path for path, each in free.items() if each.shape == value.shape and each.dtype == value.dtype]
    found.append(bool(fits))
    if fits:
        del free[fits[0]]
    return fits[0] if fits else ""


def _filled(source: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a form with arguments in the places of their paths."""
    if isinstance(source, (list, tuple)):
        return type(source)(_filled(each, arguments) for each in source)
    if source is None:
        return None
    if source in arguments:
        return arguments[source]
    return next((each for each in arguments.values() if isinstance(each, torch.Tensor)), None)


_MOST_KNOWN = 256
"""Forms of arguments that are remembered for each module."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, where its tensors and hooks are."""
_MISSING = object()


_describes = functools.cache(only_describes)


class outside_of:  # noqa: N801 - a function for who uses it; around each layer, where a generator costs more
    """Leave a function mode, if there is one, where it is the innermost.

    Args:
        mode: The mode.
    """

    __slots__ = ("_left", "_mode")
    _left: TorchFunctionMode | None

    def __init__(self, mode: TorchFunctionMode | None) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        """Leave it."""
        is_innermost = self._mode is not None and _get_current_function_mode() is self._mode  # type: ignore[no-untyped-call]
        self._left = _pop_mode() if is_innermost else None  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        """Go back into it."""
        if self._left is not None:
            _push_mode(self._left)  # type: ignore[no-untyped-call]


class NotedCalls(TorchFunctionMode):
    """Notes which functions are called in a run.

    Args:
        calls: Gets the functions' names, each with the shapes that it was given.
    """

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a function, and call it."""
        del types
        kwargs = kwargs or {}
        if not is_in_trial() and not _describes(func):
            tensors = (each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            self._calls.append((name_of(func), *(tuple(each.shape) for each in tensors)))
        if func is Tensor.__iter__:  # which would return an iterator whose tensors are made outside
            return iter(args[0].unbind())
        return func(*args, **kwargs)


class _KnownReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values decided something."""

    _TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.were_seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does."""
        del types
        self.were_seen = self.were_seen or not self._TAGS.isdisjoint(func.tags)
        return func(*args, **(kwargs or {}))


class AbsentCalls:
    """Tells what a module that is not run would return, without the values; remembered by the arguments' forms.

    Args:
        module: The module, without collectives in its forward.
        forward: That forward.
        origin: What the module is called in errors.

    Attributes:
        parts: The modules inside.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], origin: str) -> None:
        self._module, self._forward, self._origin = module, forward, origin
        self.parts = [each for each in module.modules() if each is not module]
        self._hooks = [part._forward_hooks for part in self.parts]  # noqa: SLF001 - torch tells it nowhere else
        self._known: dict[Any, tuple[list[Any], Any]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at what modules inside return, by forward hooks."""
        return any(self._hooks)

    def result(self, forms: ResultForms, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call would return.

        Args:
            forms: What operations on absent tensors return.
            args: Of the call.
            kwargs: Of the call.

        Raises:
            Exception: What the forward raises without values.
        """
        leaves: list[Any] = [*args, *kwargs.values()]
        structure: Any = (len(args), *kwargs)
        if not all(map(is_plain, leaves)):
            leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        key = None if self.is_watched else self._key(leaves, structure)
        found = None if key is None else self._known.get(key)
        if found is None:
            args, kwargs = pytree.tree_map(self._without_values, (args, dict(kwargs)))
            reads = _KnownReads()
            with in_trial(forms), reads, preserve_attributes(self._module), _kept_buffers(self._module):
                output = self._forward(*args, **kwargs)
            results, form = pytree.tree_flatten(output)
            found = [ActivationMeta.of(each) if isinstance(each, Tensor) else each for each in results], form
            if key is not None and not reads.were_seen and all(map(is_plain, results)):
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        made = [absent_like(each, self._origin) if isinstance(each, ActivationMeta) else each for each in found[0]]
        return made[0] if found[1].is_leaf() else pytree.tree_unflatten(made, found[1])

    def _without_values(self, leaf: Any) -> Any:
        is_known = isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, AbsentTensor)
        return absent_like(ActivationMeta.of(leaf), self._origin) if is_known else leaf

    def _key(self, leaves: Sequence[Any], structure: Any) -> Any:
        if not all(map(is_plain, leaves)):
            return None
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        described = (
            ActivationMeta.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf)) for leaf in leaves
        )
        return structure, casts, self._module.training, torch.is_grad_enabled(), *described


def show(module: nn.Module, output: Any, *, without: int | None = None) -> None:
    """Call a module's forward hooks as if it had returned something.

    Args:
        module: The module.
        output: What it would return.
        without: The hook to leave out.
    """
    for key, hook in list(module._forward_hooks.items()):  # noqa: SLF001 - nothing else calls them
        if key != without:
            is_named = key in module._forward_hooks_with_kwargs  # noqa: SLF001 - likewise
            replaced = hook(module, (), *([{}] if is_named else []), output)
            output = output if replaced is None else replaced


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Put tensors back that a forward leaves in modules, as they are fake; other attributes stay as they are set.

    So are those that it adds to lists and dicts. Models note in attributes which hooks they have registered, for
    example, and hooks stay.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, kept in before
        for name, value in kept.items()
        if type(value) in (list, dict) and name not in OF_TORCH
    ]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name, value in [*attributes.items()]:
                if value is not kept.get(name, _MISSING) and _holds_tensors(value):
                    if name in kept:
                        attributes[name] = kept[name]
                    else:
                        del attributes[name]
        for value, kept in contents:
            if _holds_tensors(value):
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(kept)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) or hides_tensors(leaf) for leaf in pytree.tree_leaves(value))


@contextlib.contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Let a module write to copies of its buffers."""
    before = [(each, dict(each._buffers)) for each in module.modules()]  # noqa: SLF001 - setting them would check each
    try:
        for each, buffers in before:
            for name, buffer in buffers.items():
                each._buffers[name] = None if buffer is None else buffer.clone()  # noqa: SLF001 - likewise
        yield
    finally:
        for each, buffers in before:
            each._buffers.update(buffers)  # noqa: SLF001 - likewise
