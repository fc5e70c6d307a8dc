"""The page for Colossal-AI's scripts names every option that our classes have, and none that they lack as the same."""

import inspect
import re
from pathlib import Path

import pytest

import booster_core.plugin
from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_zero import LowLevelZeroPlugin

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "moving-from-colossalai.md").read_text(encoding="utf-8")
CLASSES = [Booster, TorchDDPPlugin, TorchFSDPPlugin, LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin]


def section_of(title):
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def names_in(text):
    """Return the words inside of backticks, also those of calls such as `f(a, b=1)`."""
    return {word for code in re.findall(r"`([^`]*)`", text) for word in re.findall(r"[A-Za-z_]\w*", code)}


@pytest.mark.parametrize("owner", CLASSES)
def test_every_option_is_on_the_page(owner):
    missing = set(inspect.signature(owner).parameters) - names_in(section_of(owner.__name__))
    assert not missing


def test_every_method_of_booster_is_on_the_page():
    public = {name for name in dir(Booster) if not name.startswith("_")}
    assert not public - names_in(section_of("Booster"))


@pytest.mark.parametrize("owner", CLASSES)
def test_what_is_gone_is_gone(owner):
    """A row that says so is wrong once the option is there."""
    rows = [row.split("|")[1:3] for row in section_of(owner.__name__).splitlines() if row.startswith("|")]
    gone = {name for theirs, ours in rows if ours.strip() == "gone" for name in re.findall(r"`(\w+)`", theirs)}
    assert not gone & set(inspect.signature(owner).parameters)


PLUGINS = CLASSES[1:]


def arguments_of(owner):
    """Yield the arguments of their plugin, by the first column of its tables."""
    for row in section_of(owner.__name__).splitlines():
        if row.startswith("| `") and "`plugin." not in row:
            yield from re.findall(r"`(\w+)(?:=[^`]*)?`", row.split("|")[1])


@pytest.mark.parametrize("owner", PLUGINS)
def test_what_is_renamed_or_gone_says_what_to_pass(owner):
    taken = set(inspect.signature(owner).parameters)
    told = {name for name in arguments_of(owner) if name not in taken}
    assert told
    for name in told:
        with pytest.raises(TypeError, match=rf"{owner.__name__} has no argument `{name}`: \S+"):
            owner(**{name: 1})
    assert owner.renamed_arguments.keys().isdisjoint(taken)
    assert not owner.renamed_arguments.keys() - names_in(PAGE)


@pytest.mark.parametrize("owner", PLUGINS[1:])
def test_options_without_a_name_are_asked_for_by_name(owner):
    first = next(iter(inspect.signature(owner).parameters))
    with pytest.raises(TypeError, match=rf"{owner.__name__} takes its arguments by name, such as `{first}=...`; got 2"):
        owner(2)


def test_the_plugin_of_experts_says_which_it_is_now():
    with pytest.raises(AttributeError, match=r"HybridParallelPlugin\(ep_size=...\) of booster-hybrid"):
        _ = booster_core.plugin.MoeHybridParallelPlugin
