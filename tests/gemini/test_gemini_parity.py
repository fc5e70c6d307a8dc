"""Optimizers, formats and all kinds of parameters, wherever chunks are: the bits of a run whose chunks stay.

The model has frozen, unused and tied parameters and a repeated layer, and its optimizer two groups; that the run whose
chunks stay equals one process is the conformance kit's business.
"""

import gc

import torch
from matrix import matrix

from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_testing.training import Training, train_boosted

PLACES = {
    "static halves": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "everything on disk": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "auto": {"placement_policy": "auto", "memory_budget_bytes": 8_000},
}
OPTIMIZERS = ["sgd", "adamw", "adafactor", "muon"]


def make(optimizer, precision=None, options=None):
    return Training(
        plugin_class=GeminiPlugin,
        options={"min_chunk_bytes": 256, **(options or {})},
        optimizer=optimizer,
        precision=precision,
        micro_batches=(2, 3),
        max_norm=0.05,
        steps=3,
    )


def train(training):
    trained = train_boosted(training)
    gc.collect()  # the threads of the disk go with the model
    return trained


@matrix(["muon-None"], optimizer=OPTIMIZERS, precision=[None, "fp16"])
def test_bits_do_not_depend_on_the_placement(optimizer, precision, tmp_path):
    still = run_on_ranks(train, 2, make(optimizer, precision))
    for name, place in PLACES.items():
        moved = run_on_ranks(train, 2, make(optimizer, precision, {**place, "offload_dir": str(tmp_path)}))
        for actual, expected in zip(moved, still, strict=True):
            assert (actual.losses, actual.norms) == (expected.losses, expected.norms), name
            for got, wanted in zip(
                [*actual.gradients, actual.parameters], [*expected.gradients, expected.parameters], strict=True
            ):
                assert got.keys() == wanted.keys()
                assert [key for key, tensor in wanted.items() if not torch.equal(got[key], tensor)] == [], name
