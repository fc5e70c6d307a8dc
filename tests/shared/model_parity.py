"""Trainings of models of the zoo and their heads, for tests that compare the hybrid plugin with one process.

fp32 is compared with a small tolerance. bf16 in one process is not exact either: its distance to fp32, with equally
rounded parameters, bounds that of the plugin.
"""

from dataclasses import replace

import torch
from cases import Setting, call, parameter_paths, train_boosted, train_plainly, zoo_case
from model_zoo import ZOO, get_model
from model_zoo.registry import in_double
from model_zoo.transformers_heads import HEADS

from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for

MODELS = {**{name: model for name, model in ZOO.items() if name.startswith("transformers/")}, **HEADS}
_WITHOUT_POLICY = ("albert", "wav2vec2", "hubert")
NAMES = [name for name in MODELS if not any(family in name for family in _WITHOUT_POLICY) and "balanced" not in name]
_CANCELLING = {"transformers/sam", "transformers/bert_multiple_choice"}
"""Models whose gradients are small sums of large terms of either sign, and need fp64."""
_NARROW = 2.5
"""Allowed distance to fp32, relative to that of one process in bf16: sums over ranks round once more."""


def parity_case(name, **changes):
    """Return a training of a model of the table."""
    is_double = name in _CANCELLING
    tolerance = tolerance_for(torch.float64 if is_double else torch.float32)
    settings = {"max_norm": 1.0, "tolerance": tolerance, "loss_atol": tolerance.relative / 10}
    return zoo_case(name, double=is_double, **{**settings, **changes})


def parity_setting(name, options, num_ranks, precision=None):
    """Return a setting of the hybrid plugin with an example, since some layers take more than hidden states."""
    example = get_model(name).share(0, 0, 2)
    if name in _CANCELLING and precision is None:
        example = in_double(example)
    return Setting(HybridParallelPlugin, {**options, "example_batch": example}, num_ranks, precision)


def assert_near_fp32(case, setting):
    """Assert that the first gradients in bf16 are about as close to wide ones as those of one process.

    Args:
        case: What is trained, in fp32.
        setting: Under what, in bf16.
    """
    case = replace(case, steps=1, max_norm=None)
    results = run_on_ranks(train_boosted, setting.num_ranks, case, setting, timeout_seconds=120)
    num_replicas = results[0].num_replicas
    truth = train_plainly(case, num_replicas).gradients[0]
    rounded = case.make()[0].bfloat16()
    for replica in range(num_replicas):
        batch = case.batch(0, replica)
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(call(rounded, batch), batch)
        (loss.float() / num_replicas).backward()
    alone = {
        name: rounded.get_parameter(path).grad.float()
        for name, path in parameter_paths(rounded).items()
        if name in truth
    }
    allowed = _NARROW * _distance(alone, truth) + torch.finfo(torch.bfloat16).eps / 2
    for result in results:
        (found,) = result.trained.gradients
        assert found.keys() == truth.keys()
        assert _distance(found, truth) <= allowed


def _distance(found, truth):
    squares = [(float((found[key].float() - value).square().sum())) for key, value in truth.items()]
    return float((sum(squares) / sum(float(value.square().sum()) for value in truth.values())) ** 0.5)


def assert_parts_of_gradients(model, splits, whole, name="", relative=2e-6):
    """Check that a model's gradients in fp64, of which some are parts, are those of the whole model.

    Args:
        model: The model whose parameters are split.
        splits: Which part of a parameter it has, by name.
        whole: The whole model.
        name: Of the model, for messages.
        relative: Largest difference as a fraction of the largest gradient of all. transformers takes softmaxes, norms
            and losses in fp32 whatever the model's format.
    """
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    scale = max((float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None), default=0.0)
    for key, parameter in model.named_parameters():
        gradient = gradients[key]
        if gradient is None:
            assert parameter.grad is None, f"{name}: {key}"
            continue
        part = splits[key].take(gradient) if key in splits else gradient
        assert parameter.grad is not None, f"{name}: {key}"
        assert parameter.grad.shape == part.shape, f"{name}: {key}"
        worst = float((parameter.grad - part).abs().max()) / scale
        assert worst < relative, f"{name}: {key} {worst}"
