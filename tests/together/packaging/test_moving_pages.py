"""The page for Colossal-AI's scripts names every option that our classes have, and none that they lack as the same."""

import inspect
import re
from pathlib import Path

import pytest

import booster_core.plugin
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_zero import LowLevelZeroPlugin

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "moving-from-colossalai.md").read_text(encoding="utf-8")
PLUGINS = [TorchDDPPlugin, TorchFSDPPlugin, LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin]


@pytest.mark.parametrize("owner", PLUGINS)
def test_what_is_renamed_or_gone_says_what_to_pass(owner):
    """The first column of a plugin's tables has the arguments of their plugin."""
    taken = set(inspect.signature(owner).parameters)
    section = re.search(rf"^## {owner.__name__}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `") and "`plugin." not in row]
    told = {name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)} - taken
    assert told
    for name in told:
        with pytest.raises(TypeError, match=rf"{owner.__name__} has no argument `{name}`: \S+"):
            owner(**{name: 1})
    assert owner.renamed_arguments.keys().isdisjoint(taken)
    words = {word for code in re.findall(r"`([^`]*)`", PAGE) for word in re.findall(r"[A-Za-z_]\w*", code)}
    assert not owner.renamed_arguments.keys() - words


def test_the_plugin_of_experts_says_which_it_is_now():
    with pytest.raises(AttributeError, match=r"HybridParallelPlugin\(ep_size=...\) of booster-hybrid"):
        _ = booster_core.plugin.MoeHybridParallelPlugin
