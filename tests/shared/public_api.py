"""What the public packages of a distribution export, with signatures: read from source text, nothing is imported."""

import re
import sys
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def snapshot_path(distribution):
    """Return the file that holds the exports of the last release."""
    return ROOT / "packages" / distribution / "public_api.txt"


def exports(distribution):
    """Return one line for each export of the distribution's packages that state `__all__`, and each public member."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT / "packages" / distribution / "src")], allow_inspection=False)
    package = loader.load(distribution.replace("-", "_"))
    lines = []
    for module in _public_modules(package):
        for name in module.exports or ():
            lines += _lines(module.path, name, module.members.get(name))
    return sorted(set(lines))


def undeclared_changes(before, after, fragments):
    """Return the lines that came or went and whose name no changelog fragment has in backticks."""
    named = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]*)`", fragments))))
    named |= {part for name in named for part in name.split(".")}
    changed = sorted(set(before) ^ set(after))
    return [line for line in changed if not named & _short_names(line)]


def _short_names(line):
    """Return what a fragment may call the subject of a line: the member, or what the package exports."""
    path = re.split(r"[(:\s]", line, maxsplit=1)[0].split(".")
    exported = next(index for index, part in enumerate(path) if not part.startswith("booster_") and index > 0)
    return set(path[exported:]) | {path[-1]}


def _public_modules(package):
    private = package.name.startswith("_")
    if not private and package.exports:
        yield package
    for module in package.modules.values():
        if not private and not module.is_alias:
            yield from _public_modules(module)


def _lines(module, name, found):
    path = f"{module}.{name}"
    if found is None:
        return [path]
    try:
        target = found.final_target if found.is_alias else found
    except griffe.AliasResolutionError as error:
        return [f"{path} = {error.alias.target_path}"]  # defined in another distribution
    if target.is_function:
        return [f"{path}{_signature(target)}"]
    if target.is_class:
        bases = ", ".join(map(str, target.bases))
        lines = [f"{path}({bases})"]
        for member in target.members.values():
            public = not member.name.startswith("_") or member.name == "__init__"
            if public and member.is_function:
                lines.append(f"{path}.{member.name}{_signature(member)}")
            elif public and member.is_attribute:
                lines.append(f"{path}.{member.name}: {member.annotation}")
        return lines
    return [f"{path}: {target.annotation}" if target.is_attribute else path]


def _signature(function):
    shown, marked = [], False
    for parameter in function.parameters:
        kind = parameter.kind.value
        if kind == "keyword-only" and not marked:
            shown.append("*")
        marked = marked or kind in {"keyword-only", "variadic positional"}
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
        shown.append(f"{stars}{parameter.name}{annotation}{default}")
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return f"({', '.join(shown)}){returns}"


def write_snapshots(distributions):
    """Write the exports of distributions as those of their release."""
    for distribution in distributions:
        snapshot_path(distribution).write_text("\n".join(exports(distribution)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_snapshots(sys.argv[1:] or DISTRIBUTIONS)
