"""The documentation site: its navigation, its links, and that pages document what the code has.

`nox -s pages` also builds it strictly.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import griffe
import pytest
import yaml
from page_blocks import PAGES, ROOT

import site_versions
from booster_core.log import log

DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
READMES = sorted(ROOT.glob("packages/*/README.md"))
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


def _files_in(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _files_in(value)
            else:
                yield value


def test_the_navigation_lists_every_page_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_files_in(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in SITE)


def test_the_search_works_in_files_and_loads_nothing_from_another_host():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "offline" in settings["plugins"]
    (script,) = settings["extra"]["polyfills"]
    assert "iframe-worker" in script  # else the plugin adds one from another host
    assert (DOCS / script).is_file()


def test_pages_end_with_the_versions_of_packages():
    (hook,) = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["hooks"]
    assert hook == f"tools/{Path(site_versions.__file__).name}"
    told = site_versions.on_config(SimpleNamespace(copyright="Free")).copyright
    for name in DISTRIBUTIONS:
        assert re.search(rf"\b{name}\b[^;]* {re.escape(metadata.version(name))}(;|$)", told)


def _prose(page):
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_pages_name_the_logger_that_there_is():
    named = {
        (page.name, name)
        for page in [*SITE, *READMES]
        for name in re.findall(r"\blogger `([^`]+)`", _prose(page).replace("\n", " "))
    }
    assert {page for page, _ in named} >= {"data.md", "debugging.md"}
    assert {name for _, name in named} == {log.name}


def _anchors(page):
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)) for text in headings]
    return {re.sub(r"[-\s]+", "-", text.strip().lower()) for text in plain}


@_each_site_page
def test_links_stay_in_the_site_and_their_anchors_exist(page):
    wrong = []
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", _prose(page)):
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        is_there = other.is_relative_to(DOCS) and other.is_file()
        if not is_there or (anchor and other.suffix == ".md" and anchor not in _anchors(other)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.parent.name)
def test_readmes_of_packages_are_short_and_lead_nowhere_outside_of_the_wheel(page):
    """They are shown by package indexes, where a relative link has no target."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?://)([^)]+)\)", text) == []
    assert len(text.split()) < 400
    named = set(re.findall(r"`(docs/[\w/-]+\.md)`", text))
    assert {name for name in named if not (ROOT / name).exists()} == set()


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


def test_every_page_is_read_for_examples():
    assert set(SITE) <= set(PAGES)


def test_errors_that_the_page_lists_are_raised_somewhere():
    texts = (path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))  # a message is written over several lines
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and " ... " in line]
    words = [words.strip() for cell in cells for _, words in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    assert len(words) > 15
    assert [each for each in words if each not in joined] == []
