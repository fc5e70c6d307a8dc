"""The arguments of a layer's call by name: tensors in tuples, lists and dicts have paths such as ``"state[0]"``.

What a layer that is not run returns is like some of these tensors.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime.data import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
