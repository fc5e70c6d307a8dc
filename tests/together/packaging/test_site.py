"""The documentation site: its navigation, its links, and that pages document what the code has.

`nox -s pages` also builds it strictly.
"""

from __future__ import annotations

import re

import griffe
import pytest
from page_blocks import PAGES, ROOT

DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
PLUGINS = {
    "single": "booster_core.plugin.single.SingleDevicePlugin",
    "ddp": "booster_ddp.plugin.TorchDDPPlugin",
    "fsdp": "booster_fsdp.plugin.TorchFSDPPlugin",
    "zero": "booster_zero.plugin.LowLevelZeroPlugin",
    "gemini": "booster_gemini.plugin.GeminiPlugin",
    "hybrid": "booster_hybrid.plugin.HybridParallelPlugin",
    "../fault-tolerance": "booster_ft.plugin.FaultTolerantPlugin",
}
"""The page of each plugin, and its class."""
_each_site_page = pytest.mark.parametrize("page", SITE, ids=lambda page: page.relative_to(DOCS).as_posix())


def _prose(page):
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def sources():
    """Read all packages without importing them."""
    paths = [str(ROOT / "packages" / name / "src") for name in DISTRIBUTIONS]
    loader = griffe.GriffeLoader(search_paths=paths, allow_inspection=False)
    for name in DISTRIBUTIONS:
        loader.load(name.replace("-", "_"))
    loader.resolve_aliases()
    return loader.modules_collection


def _directives(page):
    return re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def _documented(found):
    """Return the names under Args in the docstring of a class or function."""
    sections = griffe.parse_google(found.docstring, warnings=False) if found.docstring else []
    return {each.name for section in sections if section.kind.value == "parameters" for each in section.value}


@_each_site_page
def test_directives_name_public_things(page, sources):
    for path in _directives(page):
        found = sources[path]
        assert found.docstring, path
        if not found.is_module:
            assert path.rpartition(".")[2] in (sources[path.rpartition(".")[0]].exports or ()), path


@pytest.mark.parametrize("name", PLUGINS)
def test_every_option_of_a_plugin_is_on_its_page(name, sources):
    page = DOCS / "plugins" / f"{name}.md"
    constructor = sources[PLUGINS[name]].members["__init__"]
    options = {each.name for each in constructor.parameters} - {"self"}
    documented = set().union(*(_documented(sources[path]) for path in _directives(page)))
    named = set(re.findall(r"`(\w+)`", _prose(page)))
    in_prose = {"precision", "mesh", "offload_policy", "autocast"}  # the last three raise with a remedy
    assert options - documented <= in_prose & named
    assert options, "the constructor is read"


def test_pages_and_messages_name_methods_that_booster_has(sources):
    """Also in prose and tables, and in errors: functions that take the Booster are no methods of it."""
    colossal_ai = {"load", "save"}  # named on the page for its scripts
    methods = set(sources["booster_core.booster.Booster"].members) | colossal_ai
    called = {
        (page.name, name)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"(?<![\w.])booster\.(\w+)\(", page.read_text(encoding="utf-8"))
    }
    called |= {
        (path.name, name)
        for path in ROOT.glob("packages/*/src/**/*.py")
        for name in re.findall(r"`booster\.(\w+)\(", path.read_text(encoding="utf-8"))
    }
    assert {name for _, name in called} >= {"boost", "backward", "save_model"}
    assert {(page, name) for page, name in called if name not in methods} == set()


def test_every_public_package_has_a_reference(sources):
    pages = [path for page in DOCS.glob("reference/*.md") for path in _directives(page)]
    doors = set()
    for distribution in DISTRIBUTIONS:
        package = sources[distribution.replace("-", "_")]
        doors |= {module.path for module in [package, *package.modules.values()] if module.exports}
    documented_above = {
        "booster_core.booster",
        "booster_runtime.loops",
        "booster_runtime.loops.stop_signal",
        "booster_tools.notebooks",
    }
    """Modules whose names are documented in their distribution's own package."""
    unpublished = {
        "booster_core.lazy_import",
        "booster_core.log",
        "booster_core.matching",
        "booster_runtime.label_means",
        "booster_zero.engine",
        "booster_zero.gathering",
    }
    unpublished |= documented_above
    assert sorted(pages) == sorted(doors - unpublished)


def test_errors_that_the_page_lists_are_raised_somewhere():
    texts = (path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))  # a message is written over several lines
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and " ... " in line]
    words = [words.strip() for cell in cells for _, words in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    assert len(words) > 15
    assert [each for each in words if each not in joined] == []
