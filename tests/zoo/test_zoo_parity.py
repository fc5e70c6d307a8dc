"""Gradients and parameters of every zoo model under every plugin on two ranks equal those of one process.

The optimizer is AdamW with an epsilon above most gradients, so that rounding errors of tiny gradients stay tiny in
the parameters: this tests the plugin, not the conditioning of Adam. Dropout probabilities are 0.
"""

from __future__ import annotations

import importlib
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest
import torch
from isolated_libraries import FOLDER, missing_libraries
from model_zoo import ZOO, ZooModel, get_model
from torch import Tensor, nn

from booster_core import Booster, DistCoordinator
from booster_testing import close_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

WORLD_SIZE = 2
SAMPLES = 4
STEPS = 2
NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""

PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-1": ("booster_zero.LowLevelZeroPlugin", {"stage": 1}),
    "zero-2": ("booster_zero.LowLevelZeroPlugin", {"stage": 2, "bucket_bytes": 2**16}),
    "ddp": ("booster_ddp.TorchDDPPlugin", {}),
    "fsdp": ("booster_fsdp.TorchFSDPPlugin", {}),
    "gemini": ("booster_gemini.GeminiPlugin", {"min_chunk_bytes": 2**14}),
    "hybrid": ("booster_hybrid.HybridParallelPlugin", {"tp_size": 2}),
}
"""Classes and options, such that the small models fill several buckets and chunks."""
HARD = (
    "timm/convit_base",
    "timm/convit_tiny",
    "torchrec/dlrm",
    "torchrec/deepfm",
    "diffusers/vq_model",
    "transformers/albert",
    "transformers/albert_pretraining",
    "transformers/bert",
    "transformers/bert_pretraining",
    "transformers/gpt2_double_heads",
)
"""Models that Colossal-AI excludes from its low-level ZeRO tests: repeated layers, odd inputs, unused parameters."""


WITHOUT_POLICY = ("albert", "wav2vec2", "hubert")
"""transformers families without a tensor parallel policy; models of other libraries have none either."""


class Trained(NamedTuple):
    """Gradients by name for each step, and the parameters after the last."""

    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-2, weight_decay=0.0)


def train_plainly(name: str) -> Trained:
    """Train with plain torch on whole batches, or on the mean of the ranks' losses if samples are coupled."""
    zoo = get_model(name)
    model = zoo.seeded()
    optimizer = make_optimizer(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = []
    for step in range(STEPS):
        batches = (
            [zoo.share(step, rank, SAMPLES) for rank in range(WORLD_SIZE)]
            if zoo.couples_samples
            else [zoo.whole(step, WORLD_SIZE, SAMPLES)]
        )
        for batch in batches:
            (zoo.loss_of(model, batch) / len(batches)).backward()
        gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(gradients, {name: parameter.detach() for name, parameter in named.items()})


def train_boosted(name: str, plugin_class: str, options: dict[str, Any]) -> Trained | None:
    """Train under a plugin on this rank's samples; rank 0 returns the result after all ranks have compared theirs."""
    coordinator = DistCoordinator()
    zoo = get_model(name)
    home, _, kind = plugin_class.rpartition(".")
    booster = Booster("cpu", plugin=getattr(importlib.import_module(home), kind)(**options))
    original = zoo.seeded()
    shapes = {name: p.shape for name, p in original.named_parameters() if p.requires_grad}
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    assert optimizer is not None, "boost returned what it was given"
    gradients = []
    for step in range(STEPS):
        loss = loss_here(booster, zoo, model, step)
        booster.backward(loss, optimizer)
        whole = {name: booster.full_gradient(model, name) for name in shapes}
        # A plugin may return a zero gradient for a parameter without a gradient.
        gradients.append({n: torch.zeros(shapes[n]) if grad is None else grad for n, grad in whole.items()})
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: value for name, value in whole_model(booster, model).items() if name in shapes}
    sums = [float(grad.double().sum()) for each in gradients for grad in each.values()]
    assert coordinator.all_gather_object(sums) == [sums] * coordinator.world_size, "ranks disagree on gradients"
    return Trained(gradients, parameters) if coordinator.is_master() else None


def loss_here(booster: Booster, zoo: ZooModel, model: nn.Module, step: int) -> Tensor:
    """Return the loss of this rank's samples, or of all samples if the ranks form one replica."""
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    if size == WORLD_SIZE:
        return zoo.loss_of(model, zoo.share(step, rank, SAMPLES))
    if zoo.couples_samples:
        return (
            sum((zoo.loss_of(model, zoo.share(step, each, SAMPLES)) for each in range(WORLD_SIZE)), torch.zeros(()))
            / WORLD_SIZE
        )
    return zoo.loss_of(model, zoo.whole(step, WORLD_SIZE, SAMPLES))


@pytest.fixture(scope="module")
def plain_runs():
    """Return the result of a model's plain training; run once for all plugins, on the first rank's worker."""
    known: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in known:
            (known[name],) = run_on_ranks(train_plainly, 1, name, timeout_seconds=240)
        return known[name]

    yield train
    close_ranks()  # these workers have imported modules that other tests must not see


def _cases() -> list[Any]:
    """Return all pairs of models and plugins."""
    return [
        pytest.param(
            name,
            plugin,
            id=f"{name}-{plugin}",
            marks=_marks(name, plugin),
        )
        for name in ZOO
        for plugin in PLUGINS
        if plugin != "hybrid" or _has_policy(name)
    ]


def _has_policy(name: str) -> bool:
    library, _, family = name.partition("/")
    return library == "transformers" and not family.startswith(WITHOUT_POLICY)


def _marks(name: str, plugin: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a pair: by default, hard models train under both ZeRO stages, and each under some plugin."""
    if ZOO[name].slow:
        return [pytest.mark.slow]
    if name in HARD and plugin in ("zero-1", "zero-2"):
        return []
    return [pytest.mark.covering(1)]


@pytest.mark.parametrize(("name", "plugin"), _cases())
def test_training_equals_one_process(name, plugin, plain_runs):
    model = ZOO[name]
    if missing := missing_libraries(model.needs):
        pytest.skip(f"{', '.join(missing)} not installed, neither in the environment nor in {FOLDER}")
    expected = plain_runs(name)
    actual, _ = run_on_ranks(train_boosted, WORLD_SIZE, name, *PLUGINS[plugin], timeout_seconds=240)
    for step in range(STEPS):
        assert_equal(actual.gradients[step], expected.gradients[step], model.no_effect, largest(expected, step))
    # A step of this optimizer is at most a tenth of the gradient, so the tolerance of gradients holds for steps, too.
    assert_equal(actual.parameters, expected.parameters, model.no_effect, largest(expected, STEPS - 1))


def largest(trained: Trained, step: int) -> float:
    """Return the largest gradient of a step."""
    return max(float(gradient.abs().max()) for gradient in trained.gradients[step].values())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], no_effect: tuple[str, ...], scale: float) -> None:
    """Compare each tensor on its own scale, and those without effect on the loss on the model's scale."""
    assert ours.keys() == theirs.keys()
    without = {name for name in theirs if any(fnmatch(name, pattern) for pattern in no_effect)}
    differences = {name: float((ours[name] - theirs[name]).abs().max()) for name in without}
    assert all(difference <= NO_EFFECT * scale for difference in differences.values()), differences
    effective = theirs.keys() - without
    assert_same_tensors(
        {name: ours[name] for name in effective},
        {name: theirs[name] for name in effective},
        tolerance_for(torch.float32),
    )


@pytest.mark.parametrize("name", HARD)
def test_default_run_includes_the_hard_models(name):
    assert not ZOO[name].slow
