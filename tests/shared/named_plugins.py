"""Plugins by name for tests that run scripts, and the scripts' model."""

import torch
from reference_plugins import ReferencePlugin

from booster_testing.models import tiny_llama

NAMES = ["single", "ddp", "fsdp", "zero", "gemini", "hybrid", "hybrid-tp", "hybrid-pp"]


def plugin_named(name):
    """Return the plugin of a name, for ``Booster(plugin=...)``."""
    if name == "single":
        return None
    if name == "reference":
        return ReferencePlugin()
    if not name.startswith("hybrid-"):
        return name
    from booster_hybrid import HybridParallelPlugin

    return HybridParallelPlugin(tp_size=2) if name == "hybrid-tp" else HybridParallelPlugin(pp_size=2)


def make_model():
    """Return the same model on every rank; the script's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny_llama()
