"""The documentation site: its navigation, its links, and that pages document what the code has.

`nox -s pages` also builds it strictly.
"""

import re

import griffe
import pytest
from page_blocks import ROOT

DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

DOCS = ROOT / "docs"
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


@pytest.fixture(scope="module")
def sources():
    """Read all packages without importing them."""
    paths = [str(ROOT / "packages" / name / "src") for name in DISTRIBUTIONS]
    loader = griffe.GriffeLoader(search_paths=paths, allow_inspection=False)
    for name in DISTRIBUTIONS:
        loader.load(name.replace("-", "_"))
    loader.resolve_aliases()
    return loader.modules_collection


def _documented(found):
    """Return the names under Args in the docstring of a class or function."""
    sections = griffe.parse_google(found.docstring, warnings=False) if found.docstring else []
    return {each.name for section in sections if section.kind.value == "parameters" for each in section.value}


@pytest.mark.parametrize("name", PLUGINS)
def test_every_option_of_a_plugin_is_on_its_page(name, sources):
    page = (DOCS / "plugins" / f"{name}.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    directives = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    constructor = sources[PLUGINS[name]].members["__init__"]
    options = {each.name for each in constructor.parameters} - {"self"}
    documented = set().union(*(_documented(sources[path]) for path in directives))
    named = set(re.findall(r"`(\w+)`", prose))
    in_prose = {"precision", "mesh", "offload_policy", "autocast"}  # the last three raise with a remedy
    assert options - documented <= in_prose & named
    assert options, "the constructor is read"


def test_errors_that_the_page_lists_are_raised_somewhere():
    texts = (path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))  # a message is written over several lines
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and " ... " in line]
    words = [words.strip() for cell in cells for _, words in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    assert len(words) > 15
    assert [each for each in words if each not in joined] == []
