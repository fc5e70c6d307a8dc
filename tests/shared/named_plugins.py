"""Plugins by the names under which tests run scripts; what each script trains, and on what."""

import torch

from booster_core.plugin import Plugin
from booster_testing.models import tiny_llama

NAMES = ["single", "ddp", "fsdp", "zero", "gemini", "hybrid", "hybrid-tp", "hybrid-pp"]


def plugin_named(name: str) -> Plugin | str | None:
    """Return what a script passes as ``Booster(plugin=...)``."""
    if name == "single":
        return None
    if not name.startswith("hybrid-"):
        return name
    from booster_hybrid import HybridParallelPlugin

    return HybridParallelPlugin(tp_size=2) if name == "hybrid-tp" else HybridParallelPlugin(pp_size=2)


def make_model() -> torch.nn.Module:
    """Return the same model everywhere; the script stays as it was seeded, or not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny_llama()


def samples() -> torch.Tensor:
    """Return 12 samples of 6 tokens."""
    return torch.randint(16, (12, 6), generator=torch.Generator().manual_seed(1))
