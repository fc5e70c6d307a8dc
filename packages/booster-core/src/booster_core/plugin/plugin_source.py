"""What a plugin's source text says of the plugin, read without importing any of it.

`booster_core.plugin` lists plugins from here, so that a listing is quick, never imports torch, and never runs a
stranger's code. Only plain declarations are understood: names, strings, numbers, sets of capabilities, base classes and
imports. What needs running stays unknown, which is a fact of its own (``None``) and never a guess.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.plugin.interface import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_HOPS = 16
"""Imports and base classes are followed this far; a cycle of re-exports ends here."""


class SourceError(Exception):
    """A plugin's source is missing, cannot be parsed, or imports what is not installed."""


class NotStaticError(Exception):
    """A declaration can be known only by running it."""


@dataclass(frozen=True, kw_only=True)
class ClassFacts:
    """What the source of a plugin class declares; ``None`` is what only importing it would tell.

    Args:
        class_name: Name of the class.
        name: The plugin's name.
        api_version: The version of the plugin interface it was written for.
        states_api_version: Whether the class itself says so, and not a class that it extends.
        available: Whether it trains in this version.
        capabilities: Values of its `Capability` set, sorted.
    """

    class_name: str
    name: str | None
    api_version: int | None
    states_api_version: bool
    available: bool | None
    capabilities: tuple[str, ...] | None


@dataclass(frozen=True)
class _Module:
    """A parsed module: its full name, its syntax tree, and whether it is a package."""

    name: str
    tree: ast.Module
    is_package: bool

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module that a (possibly relative) import names."""
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        parent = parts[: len(parts) - node.level + int(self.is_package)]
        return ".".join([*parent, node.module] if node.module else parent)


class PluginSource:
    """Reads modules by name, each once.

    Collective: none.
    """

    def __init__(self) -> None:
        self._modules: dict[str, _Module | None] = {}

    def docstring(self, module: str) -> str:
        """Return a module's docstring; empty where it has none, or no source.

        Raises:
            SourceError: If the module or a package around it is missing, or has a syntax error.
        """
        found = self._read(module)
        return "" if found is None else ast.get_docstring(found.tree) or ""

    def plugin_classes(self, hooks_module: str) -> list[ClassFacts] | None:
        """Return the facts of the classes that a hooks module's ``booster_plugins`` returns.

        Args:
            hooks_module: Full name of the module that an entry point names.

        Returns:
            ``None`` where the classes are not plainly listed in the source.

        Raises:
            SourceError: If the module, a package around it or a module that defines a class is missing, has a syntax
                error, or imports a package that is not installed.
        """
        module = self._read(hooks_module)
        if module is None:
            return None
        self._check_imports(module)
        hook = next((node for node in _functions(module.tree) if node.name == "booster_plugins"), None)
        if hook is None:
            return None
        returned = [node.value for node in ast.walk(hook) if isinstance(node, ast.Return)]
        if len(returned) != 1 or not isinstance(returned[0], ast.List | ast.Tuple):
            return None
        facts = []
        for element in returned[0].elts:
            if not isinstance(element, ast.Name):
                return None
            found = self._find_class(module, element.id)
            if found is None:
                return None
            self._check_imports(found[0])
            facts.append(self._facts(*found))
        return facts

    def _facts(self, module: _Module, definition: ast.ClassDef) -> ClassFacts:
        name = self._attribute(module, definition, "name")
        api_version = self._attribute(module, definition, "api_version")
        available = self._attribute(module, definition, "available")
        capabilities = self._attribute(module, definition, "capabilities")
        return ClassFacts(
            class_name=definition.name,
            name=name if isinstance(name, str) else None,
            api_version=api_version if isinstance(api_version, int) else None,
            states_api_version=_assigned(definition.body, "api_version") is not None,
            available=available if isinstance(available, bool) else None,
            capabilities=tuple(sorted(map(str, capabilities))) if isinstance(capabilities, frozenset) else None,
        )

    def _attribute(self, module: _Module, definition: ast.ClassDef, name: str) -> object:
        try:
            return self._class_attribute(module, definition, name, 0)
        except (NotStaticError, LookupError):
            return None

    def _class_attribute(self, module: _Module, definition: ast.ClassDef, name: str, hops: int) -> object:
        """Evaluate a class attribute, searching the base classes depth first."""
        value = _assigned(definition.body, name)
        if value is not None:
            return self._evaluate(module, value, hops + 1)
        for base in definition.bases:
            found = self._find_class(module, base.id) if isinstance(base, ast.Name) and hops < _MAX_HOPS else None
            if found is None:
                # An unknown base could define the attribute before any later one does.
                raise NotStaticError
            try:
                return self._class_attribute(*found, name, hops + 1)
            except LookupError:
                continue
        raise LookupError(name)

    def _evaluate(self, module: _Module, node: ast.expr, hops: int) -> object:
        """Return the value of a plain expression."""
        if hops > _MAX_HOPS:
            raise NotStaticError
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Set(elts=elements) | ast.List(elts=elements) | ast.Tuple(elts=elements):
                return frozenset(self._evaluate(module, element, hops + 1) for element in elements)
            case ast.Call(func=ast.Name(id="frozenset" | "set"), args=arguments) if len(arguments) <= 1:
                return self._evaluate(module, arguments[0], hops + 1) if arguments else frozenset()
            case ast.BinOp(op=ast.BitOr() | ast.Sub()):
                return self._combine(module, node, hops)
            case _:
                return self._dereference(module, node, hops)

    def _dereference(self, module: _Module, node: ast.expr, hops: int) -> object:
        """Return what a name, a capability or an attribute of a class stands for."""
        match node:
            case ast.Name(id=name):
                assigned = _assigned(module.tree.body, name)
                if assigned is not None:
                    return self._evaluate(module, assigned, hops + 1)
            case ast.Attribute(value=ast.Name(id="Capability"), attr=member) if member in Capability.__members__:
                return Capability[member].value
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                found = self._find_class(module, owner)
                if found is not None:
                    return self._class_attribute(*found, attribute, hops + 1)
        raise NotStaticError

    def _combine(self, module: _Module, node: ast.BinOp, hops: int) -> object:
        """Return the union or difference of two sets."""
        first, second = (self._evaluate(module, side, hops + 1) for side in (node.left, node.right))
        if not (isinstance(first, frozenset) and isinstance(second, frozenset)):
            raise NotStaticError
        return first | second if isinstance(node.op, ast.BitOr) else first - second

    def _find_class(self, module: _Module, name: str) -> tuple[_Module, ast.ClassDef] | None:
        """Find where a name's class is defined, following ``from ... import`` wherever it stands in the module."""
        for _ in range(_MAX_HOPS):
            imported: tuple[str, str] | None = None
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return module, node
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            imported = module.absolute(node), alias.name
            if imported is None:
                return None
            target = self._read(imported[0])
            if target is None:
                return None
            module, name = target, imported[1]
        return None

    def _check_imports(self, module: _Module) -> None:
        """Raise if an unconditional import of the module names a package that is not installed."""
        for node in module.tree.body:
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                wanted = [node.module or ""]
            else:
                continue
            for name in wanted:
                root = name.partition(".")[0]
                if root not in sys.modules and root not in sys.stdlib_module_names and _find_spec(root, None) is None:
                    msg = f"{module.name} imports '{root}', which is not installed"
                    raise SourceError(msg)

    def _read(self, name: str) -> _Module | None:
        """Return the parsed module; ``None`` where it has no source, as a compiled one.

        The packages around it are parsed too, because importing the module would run them.
        """
        if name in self._modules:
            return self._modules[name]
        locations: Sequence[str] | None = None
        parsed: _Module | None = None
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            full_name = ".".join(parts[:count])
            spec = _find_spec(full_name, locations)
            if spec is None:
                msg = f"No module named '{full_name}'"
                raise SourceError(msg)
            locations = spec.submodule_search_locations
            if full_name not in self._modules:
                self._modules[full_name] = _parse(full_name, spec)
            parsed = self._modules[full_name]
            if locations is None and count < len(parts):
                msg = f"No module named '{'.'.join(parts[: count + 1])}'; '{full_name}' is not a package"
                raise SourceError(msg)
        return parsed


def _find_spec(name: str, locations: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Find a module as the import system would, but without importing the packages around it."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, locations)
        except (ImportError, AttributeError, ValueError, OSError):
            continue  # another package's import hook is out of order; the next finder may know the module
        if spec is not None:
            return spec
    return None


def _parse(name: str, spec: importlib.machinery.ModuleSpec) -> _Module | None:
    if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    path = spec.loader.get_filename(name)
    try:
        text = spec.loader.get_data(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stranger's invalid escape sequences are no concern of a listing
            tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        msg = f"{type(error).__name__}: {error.msg} ({path}, line {error.lineno})"
        raise SourceError(msg) from error
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise SourceError(msg) from error
    return _Module(name, tree, spec.submodule_search_locations is not None)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in tree.body if isinstance(node, ast.FunctionDef))


def _assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """Return the last value that plain assignments in a body give to a name."""
    value: ast.expr | None = None
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                value = statement.value
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name and statement.value is not None:
                value = statement.value
    return value
