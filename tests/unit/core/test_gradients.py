import math

import pytest
import torch
from torch import nn

from booster_core.gradients.clip import clip_by_norm, clip_by_value
from booster_core.gradients.norm import global_norm


def gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in [(3, 4), (7,), (0,), ()]]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_is_that_of_all_elements(norm_type, dtype):
    flat = torch.cat([gradient.flatten().double() for gradient in gradients(dtype)])
    actual = global_norm(gradients(dtype), norm_type)
    assert float(actual) == pytest.approx(float(torch.linalg.vector_norm(flat, norm_type)), rel=1e-6)


def test_norm_of_fp16_does_not_overflow():
    # The sum of squares, 1e6 * 1e4, is beyond fp16's 65504.
    assert float(global_norm([torch.full((10_000,), 100.0, dtype=torch.float16)])) == pytest.approx(1e4)


def test_norm_does_not_depend_on_how_elements_are_cut():
    elements = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    whole = global_norm([elements])
    assert torch.equal(whole, elements.double().norm().float())  # which fp32 sums miss
    assert all(torch.equal(whole, global_norm(elements.split(length))) for length in (1_000, 77_777, 2_900_000))


def test_norm_may_stay_wide():
    parts = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).split(3_000)
    wide = [global_norm([part], dtype=torch.float64) for part in parts]
    assert torch.equal(global_norm(wide, dtype=torch.float32), global_norm(parts))


def test_norm_of_nothing_is_zero():
    assert float(global_norm([])) == 0.0


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_equals_torchs(max_norm, norm_type):
    given = [gradient for gradient in gradients() if gradient.numel()]  # torch refuses an empty one's largest element
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in given]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    actual = given
    assert float(clip_by_norm(actual, max_norm, norm_type)) == pytest.approx(float(expected))
    for ours, parameter in zip(actual, parameters, strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_clipping_mixed_formats():
    mixed = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    clip_by_norm(mixed, 1.0)
    assert [gradient.dtype for gradient in mixed] == [torch.float32, torch.bfloat16]
    assert float(global_norm(mixed)) == pytest.approx(1.0, rel=1e-2)


def test_clipping_by_value():
    gradient = torch.tensor([-3.0, -0.5, 0.2, 9.0])
    clip_by_value([gradient], 0.5)
    assert gradient.tolist() == pytest.approx([-0.5, -0.5, 0.2, 0.5])
