"""Draw docs/assets/architecture.svg from the packages' imports: ``python tools/architecture.py``.

An arrow is an import that no chain of other arrows implies. `architecture-dark.svg` is the same for dark pages.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, ROW, MARGIN = 160, 54, 100, 14
COLORS = {
    "architecture.svg": ("#ffffff", "#e8eaf6", "#3f51b5", "#1a237e", "#78909c"),
    "architecture-dark.svg": ("#1e2129", "#2c3350", "#7986cb", "#e8eaf6", "#90a4ae"),
}
"""Background, boxes, their borders, text and arrows of each picture."""
WHAT = {
    "booster-checkpoint": "reads, writes checkpoints",
    "booster-core": "Booster, plugin interface",
    "booster-ddp": "DistributedDataParallel",
    "booster-fsdp": "FSDP2, HSDP",
    "booster-ft": "replica groups",
    "booster-gemini": "ZeRO-3, offload",
    "booster-hybrid": "tensor, pipeline, experts",
    "booster-runtime": "what strategies share",
    "booster-testing": "conformance kit",
    "booster-tools": "plan, verify, track",
    "booster-trainer": "transformers, TRL",
    "booster-zero": "ZeRO 1, 2; the engine",
}


def _imported(path: Path) -> set[str]:
    """Return the first names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module]
        found |= {name.partition(".")[0] for name in names}
    return found


def imports(packages: Path = ROOT / "packages") -> dict[str, set[str]]:
    """Return the distributions that each distribution imports."""
    names = {path.name.replace("-", "_"): path.name for path in sorted(packages.iterdir()) if path.is_dir()}
    return {
        name: {
            names[each] for path in (packages / name / "src").rglob("*.py") for each in _imported(path) & names.keys()
        }
        - {name}
        for name in names.values()
    }


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports that no chain of others implies."""

    @cache
    def reached(name: str) -> frozenset[str]:
        return frozenset(graph[name]).union(*(reached(each) for each in graph[name]))

    return [
        (name, each)
        for name in sorted(graph)
        for each in sorted(graph[name])
        if not any(each in reached(other) for other in graph[name] - {each})
    ]


def _rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the distributions from the topmost row to the lowest: each above all that it imports."""

    @cache
    def level(name: str) -> int:
        return 1 + max((level(each) for each in graph[name]), default=-1)

    return [
        [name for name in sorted(graph) if level(name) == row] for row in reversed(range(1 + max(map(level, graph))))
    ]


def draw(graph: dict[str, set[str]], colors: tuple[str, str, str, str, str]) -> str:
    """Return the picture of a graph of imports."""
    background, box, border, ink, arrow = colors
    rows = _rows(graph)
    widest = max(map(len, rows))
    width, height = MARGIN + widest * (WIDTH + MARGIN), 2 * MARGIN + (len(rows) - 1) * ROW + HEIGHT
    places = {
        name: ((width - len(row) * (WIDTH + MARGIN) + MARGIN) // 2 + column * (WIDTH + MARGIN), MARGIN + number * ROW)
        for number, row in enumerate(rows)
        for column, name in enumerate(row)
    }
    text = f"text {{ font: 12px system-ui, sans-serif; fill: {ink}; text-anchor: middle; }}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="Imports">',
        f"<style>{text} .name {{ font-size: 14px; font-weight: bold; }}</style>",
        '<defs><marker id="head" markerWidth="10" markerHeight="8" refX="9" refY="4" orient="auto">',
        f'<path d="M0 0 L10 4 L0 8 z" fill="{arrow}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="{background}"/>',
    ]
    for name, other in arrows(graph):
        (left, top), (to_left, end) = places[name], places[other]
        x, y, to_x = left + WIDTH // 2, top + HEIGHT, to_left + WIDTH // 2
        curve = f"M{x} {y} C{x} {y + 30} {to_x} {end - 30} {to_x} {end}"
        lines.append(f'<path d="{curve}" fill="none" stroke="{arrow}" marker-end="url(#head)"/>')
    for name, (left, top) in places.items():
        lines += [
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{box}" stroke="{border}"/>',
            f'<text x="{left + WIDTH // 2}" y="{top + 23}" class="name">{name}</text>',
            f'<text x="{left + WIDTH // 2}" y="{top + 41}">{WHAT[name]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write both pictures."""
    graph = imports()
    for name, colors in COLORS.items():
        (ROOT / "docs" / "assets" / name).write_text(draw(graph, colors), encoding="utf-8")


if __name__ == "__main__":
    main()
