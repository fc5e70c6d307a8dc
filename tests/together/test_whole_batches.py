"""`train_batch` and `evaluate_batch` run one loop under every plugin, and equal plain PyTorch on one large batch."""

from matrix import matrix
from named_plugins import NAMES, plugin_named
from whole_batches import assert_equals_one_large_batch

REPLICAS = {"single": 1, "hybrid-tp": 1, "hybrid-pp": 1}
"""Ranks with samples of their own, where it is not both."""


@matrix(["single", "hybrid-tp"], name=NAMES)
def test_gradients_and_losses_are_those_of_one_large_batch(name):
    assert_equals_one_large_batch(plugin_named(name), 1 if name == "single" else 2, REPLICAS.get(name, 2))
