"""Find the faults that can be planted in a module: one changed operator, constant, condition or statement each.

Messages of errors, assertions, annotations and decorators are left alone: they compute nothing.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),  # codespell:ignore notin
    ast.NotIn: (ast.In,),  # codespell:ignore notin
}
_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_NAMES = {
    one: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("ceil", "floor"),
        ("amax", "amin"),
        ("maximum", "minimum"),
        ("add_", "sub_"),
        ("mul_", "div_"),
    )
    for one, other in (pair, pair[::-1])
}
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True)
class Mutant:
    """A fault that can be planted in a module's syntax tree.

    Args:
        function: Qualified name of the function or class that contains it; empty at the module's level.
        line: Line number.
        source: The text of that line, stripped.
        before: The code that is changed.
        after: What takes its place.
        plant: Changes the tree. It can't be undone.
        number: Counts mutants that read alike, because a line has the same code twice.
    """

    function: str
    line: int
    source: str
    before: str
    after: str
    plant: Callable[[], None]
    number: int = 1

    @property
    def key(self):
        """Tell this mutant from others of the module, without its line number: function, line and change."""
        ordinal = f" (#{self.number})" if self.number > 1 else ""
        return self.function, self.source, f"{self.before} -> {self.after}{ordinal}"


def mutants_of(tree, text, functions=()):
    """Return the faults that can be planted in a module, in the order of its lines.

    Args:
        tree: The module's syntax tree. Planting a mutant changes it.
        text: The module's source.
        functions: Qualified names of the functions and classes to take; all when empty.
    """
    found = list(_Finder(text.splitlines()).children(tree, ""))
    chosen = [
        mutant
        for mutant in found
        if not functions or any(f"{mutant.function}.".startswith(f"{name}.") for name in functions)
    ]
    seen = Counter()
    numbered = []
    for mutant in sorted(chosen, key=lambda each: each.line):
        seen[mutant.key] += 1
        numbered.append(replace(mutant, number=seen[mutant.key]))
    return numbered


class _Finder:
    def __init__(self, lines):
        self._lines = lines

    def children(self, node, function):
        for field, value in ast.iter_fields(node):
            if field in _SKIPPED_FIELDS or (isinstance(node, ast.ClassDef) and field == "keywords"):
                continue
            if isinstance(value, list):
                for index, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        yield from self._at(child, partial(value.__setitem__, index), function)
            elif isinstance(value, ast.AST):
                yield from self._at(value, partial(setattr, node, field), function)
        for condition, put in _conditions(node):
            # One with an operator has that changed.
            if not isinstance(condition, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                yield self._mutant(condition, ast.UnaryOp(ast.Not(), condition), put, function)

    def _at(self, node, put, function):
        if _computes_nothing(node):
            return
        for new in _replacements(node):
            yield self._mutant(node, new, put, function)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}" if function else node.name
        yield from self.children(node, function)

    def _mutant(self, node, new, put, function):
        ast.copy_location(new, node)
        ast.fix_missing_locations(new)
        line = node.lineno
        return Mutant(function, line, self._lines[line - 1].strip(), _text(node), _text(new), partial(put, new))


def _text(node):
    return " ".join(ast.unparse(node).split())


def _computes_nothing(node):
    if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in {"msg", "__all__"} for target in node.targets)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring


def _replacements(node):  # noqa: C901, PLR0912 - a case for each kind of node
    """Yield what can take the place of a node, its conditions left out."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    yield ast.Compare(node.left, [*node.ops[:index], other(), *node.ops[index + 1 :]], node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for index in range(len(node.values)):
                rest = [*node.values[:index], *node.values[index + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.UnaryOp() if not isinstance(node.operand, ast.Constant):
            yield _copied(node.operand)
        case ast.Slice():
            if node.lower is not None:
                yield ast.Slice(None, node.upper, node.step)
            if node.upper is not None:
                yield ast.Slice(node.lower, None, node.step)
        case ast.Constant():
            yield from map(ast.Constant, _other_constants(node.value))
        case ast.Call():
            yield from _other_calls(node)
        case ast.Return(value=None):
            yield ast.Pass()
        case ast.Return() if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign():
            yield ast.Pass()
            if type(node.op) in _OPERATORS:
                yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
        # Without an assignment to a name, the name would be missing, which any test finds.
        case ast.Assign() if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            yield ast.Pass()
        case ast.Expr():
            yield ast.Pass()
        case ast.Continue():
            yield from (ast.Pass(), ast.Break())
        case ast.Break():
            yield from (ast.Pass(), ast.Continue())


def _other_constants(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 2 if value else 1.0]
    return [f"no {value}"] if isinstance(value, str) else []


def _other_calls(node):
    if isinstance(node.func, ast.Name):
        if node.func.id in _NAMES:
            yield ast.Call(ast.Name(_NAMES[node.func.id], ast.Load()), node.args, node.keywords)
        if node.func.id in {"sorted", "reversed"}:
            yield ast.Call(ast.Name("list", ast.Load()), node.args, [])
        if node.func.id.startswith("_") and len(node.args) == 1 and not node.keywords:
            yield _copied(node.args[0])  # as if a step of the module's own was left out
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _NAMES:
        yield ast.Call(ast.Attribute(node.func.value, _NAMES[node.func.attr], ast.Load()), node.args, node.keywords)


def _conditions(node):
    """Yield the conditions that a node depends on, each with a function that replaces it."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, partial(setattr, node, "test")
    elif isinstance(node, ast.comprehension):
        for index, condition in enumerate(node.ifs):
            yield condition, partial(node.ifs.__setitem__, index)


def _copied(node):
    """Return another node of the same meaning, whose location may be changed."""
    return type(node)(**dict(ast.iter_fields(node)))
