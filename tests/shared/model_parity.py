"""Train models of the zoo and their heads in one process, for tests that compare the hybrid plugin with it.

fp32 is compared with a small tolerance. bf16 in one process is not exact either: its distance to fp32, with equally
rounded parameters, bounds that of the plugin.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest
import torch
from isolated_libraries import import_quietly
from model_zoo import ZOO
from model_zoo.transformers_heads import HEADS

from booster_testing.compare import assert_same_tensors, tolerance_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from model_zoo import Batch, ZooModel
    from torch import Tensor, nn

STEPS = 3
MAX_NORM = 1.0
MODELS = {**{name: model for name, model in ZOO.items() if name.startswith("transformers/")}, **HEADS}
_WITHOUT_POLICY = ("albert", "wav2vec2", "hubert")
NAMES = [name for name in MODELS if not any(family in name for family in _WITHOUT_POLICY) and "balanced" not in name]
_NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""
_CANCELLING = {"transformers/sam", "transformers/bert_multiple_choice"}
"""Models whose gradients are small sums of large terms of either sign, and need fp64."""
_NARROW = 2.5
"""Allowed distance to fp32, relative to that of one process in bf16: sums over ranks round once more."""


@dataclass
class Plain:
    """Results of a training in one process.

    Attributes:
        losses: The loss of each step.
        norms: The global norm of each step's gradients.
        gradients: Each step's gradients by name, before clipping.
        parameters: The trained parameters by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose epsilon exceeds most gradients, so that rounding errors stay small in parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-2, weight_decay=0.0)


def find(name: str) -> ZooModel:
    """Return a model of the table by name, with its library imported."""
    zoo = MODELS[name]
    import_quietly(zoo.needs)
    return zoo


def seeded(zoo: ZooModel) -> nn.Module:
    """Return the model in the dtype of its comparison."""
    return zoo.seeded().double() if zoo.name in _CANCELLING else zoo.seeded()


def in_format(zoo: ZooModel, batch: Batch) -> Batch:
    """Return a batch in the dtype of the model's comparison."""
    if zoo.name not in _CANCELLING:
        return batch
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def train_plainly(zoo: ZooModel, batch_of: Callable[[int], Batch]) -> Plain:
    """Train in one process, on the whole batch of each step."""
    model = seeded(zoo)
    optimizer = make_optimizer(model)
    plain = Plain()
    for step in range(STEPS):
        loss = zoo.loss_of(model, in_format(zoo, batch_of(step)))
        loss.backward()
        plain.gradients.append(gradients_of(model))
        plain.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        plain.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    plain.parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return plain


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Tensor], zoo: ZooModel, scale: float) -> None:
    """Assert that named tensors agree; those without effect on the loss relative to the model's largest gradient."""
    without = {name for name in theirs if any(fnmatch(name, pattern) for pattern in zoo.no_effect)}
    differences = {name: float((ours[name] - theirs[name]).abs().max()) for name in without}
    assert all(difference <= _NO_EFFECT * scale for difference in differences.values()), differences
    kept = theirs.keys() - without
    tolerance = tolerance_for(torch.float64 if zoo.name in _CANCELLING else torch.float32)
    assert_same_tensors({name: ours[name] for name in kept}, {name: theirs[name] for name in kept}, tolerance)


def largest(gradients: Mapping[str, Tensor]) -> float:
    """Return the largest magnitude of all gradients."""
    return max(float(gradient.abs().max()) for gradient in gradients.values())


def assert_narrow(
    zoo: ZooModel,
    batch: Batch,
    gradients: Callable[[Iterable[str]], Mapping[str, Any]],
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> None:
    """Assert that gradients in a narrow dtype are about as close to fp32's as those of one process.

    Args:
        zoo: The model.
        batch: The whole batch.
        gradients: Returns the plugin's gradients of the named parameters.
        dtype: The narrow dtype.
        scale: Loss scale of backward.
    """
    whole = zoo.seeded()
    zoo.loss_of(whole, batch).backward()
    truth = gradients_of(whole)
    rounded = copy.deepcopy(zoo.seeded()).to(dtype)
    with torch.autocast("cpu", dtype):
        loss = zoo.loss_of(rounded, batch)
    (loss.float() * scale).backward()
    alone = {key: gradient.float() / scale for key, gradient in gradients_of(rounded).items()}
    found = gradients(truth)
    assert all(gradient is not None for gradient in found.values())
    ours, theirs = _distance(found, truth), _distance(alone, truth)
    assert ours <= _NARROW * theirs + torch.finfo(dtype).eps / 2, (ours, theirs)


def _distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    squares = [(float((found[key].float() - truth[key]).square().sum())) for key in truth if key in found]
    return float((sum(squares) / sum(float(value.square().sum()) for value in truth.values())) ** 0.5)


def cases(names: Iterable[str], default: Iterable[str]) -> list[Any]:
    """Return the cases of a table; those that are not run by default are marked as slow."""
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.slow]) for name in names]


def assert_parts_of_gradients(model: nn.Module, splits: Mapping[str, Any], whole: nn.Module, name: str) -> None:
    """Check that a model's gradients in fp64, of which some are parts, are those of the whole model."""
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for key, parameter in model.named_parameters():
        gradient = gradients[key]
        if gradient is None:
            assert parameter.grad is None, f"{name}: {key}"
            continue
        part = splits[key].take(gradient) if key in splits else gradient
        assert parameter.grad is not None, f"{name}: {key}"
        assert parameter.grad.shape == part.shape, f"{name}: {key}"
        # transformers takes softmaxes, norms and losses in fp32 whatever the model's format.
        worst = float((parameter.grad - part).abs().max()) / scale
        assert worst < 2e-6, f"{name}: {key} {worst}"
