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


def test_the_plugin_of_experts_says_which_it_is_now():
    with pytest.raises(AttributeError, match=r"HybridParallelPlugin\(ep_size=...\) of booster-hybrid"):
        _ = booster_core.plugin.MoeHybridParallelPlugin
