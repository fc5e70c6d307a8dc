"""Plans of transformers that need more than they say, or styles of their own, train as one process does."""

from importlib.util import find_spec

import pytest
import torch
from family_models import batch_of, build
from ranked import on_ranks, raises_on_ranks

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_tools import TrainingFunctions, verify

MODES = {
    "tp": {"tp_size": 2},
    "split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "all_to_all": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
}


def unexplained(name, mode):
    """Verify a tiny model of a family; return what differs."""
    if find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"needs a later transformers, which has the family {name}")

    def make():
        model = build(name)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)

    functions = TrainingFunctions(make, lambda: batch_of(name))
    return verify(functions, HybridParallelPlugin(**MODES[mode])).unexplained


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("apertus", "tp"),  # learns the slopes of its activation
        ("deepseek_v2", "tp"),  # rotary keys of all heads, and latent vectors of two widths
        ("deepseek_v2", "split_gather"),
        ("granite_swa", "tp"),  # a sink for each head
    ],
)
@on_ranks(2, timeout_seconds=120)
def test_a_plan_trains_as_one_process_does(name, mode):
    assert unexplained(name, mode) == ()


@raises_on_ranks(
    ConfigError,
    r"The sharding policy of DogeForCausalLM changes what layer 'model\.layers\.0' computes",
    2,
    timeout_seconds=120,
)
def test_a_plan_that_changes_a_layer_is_refused():
    unexplained("doge", "tp")


@raises_on_ranks(ConfigError, r"computes with its attention mask itself \(`dtype`\)", 2, timeout_seconds=120)
def test_a_layer_that_computes_with_its_mask_is_refused():
    unexplained("doge", "all_to_all")
