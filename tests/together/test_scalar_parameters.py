"""Parameters without dimensions, and frozen ones that are expanded, train, save and load as all others do."""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from cases import Case, Setting, assert_equals_one_process, train_plainly
from matrix import matrix
from plugin_runs import RUNS, runs
from safetensors.torch import load_file
from torch import nn

from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 0.5, "offload_dir": tempfile.gettempdir()}
SETTINGS = {
    **runs("ddp", "fsdp"),
    "zero": RUNS["zero1"],
    "zero whole": Setting(LowLevelZeroPlugin, {"partition": "parameter"}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "gemini offloaded": Setting(GeminiPlugin, {"min_chunk_bytes": 256, **OFFLOADED}),
    "gemini whole": Setting(GeminiPlugin, {"min_chunk_bytes": 256, "partition": "parameter"}),
    "hybrid": Setting(HybridParallelPlugin),
    "hybrid zero": Setting(HybridParallelPlugin, {"zero_stage": 2}),
    "hybrid zero3": RUNS["zero3"],
}


class Contrasting(nn.Module):
    """Scores by a scale of no dimension, as CLIP does, and has a frozen parameter whose elements are one in memory."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = nn.Linear(6, 8), nn.Linear(6, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.logit_bias = nn.Parameter(torch.tensor(-0.5))
        self.double()
        self.gains = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64).expand(6), requires_grad=False)

    def forward(self, x):
        rows, columns = self.rows(x * self.gains), self.columns((x * self.gains).flip(1))
        return torch.tanh((rows * columns).sum(1) * self.logit_scale.exp() + self.logit_bias)


def batch(number, replica):
    generator = torch.Generator().manual_seed(10 * number + replica)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def momentum(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def save(path, booster, model, _optimizer):
    booster.save_model(model, path, use_safetensors=True)


@matrix(["ddp", "fsdp", "hybrid"], name=SETTINGS)
def test_scalar_parameters_train_as_in_one_process(name, tmp_path):
    close = tolerance_for(torch.float64)
    case = Case(build=Contrasting, batch=batch, optimizer=momentum, steps=4, tolerance=close)
    tell = partial(save, tmp_path / "last")
    assert_equals_one_process(case, SETTINGS[name], tell=tell, checkpoint=tmp_path / "run")
    assert_same_tensors(load_file(tmp_path / "last"), train_plainly(case, 2).parameters, close)
