"""The norm of gradients on the CPU, whose rows are summed in fp32."""

from __future__ import annotations

import math

import pytest
import torch

from booster_core.gradients.norm import global_norm


@pytest.fixture
def without_the_exact_kernel(monkeypatch):
    """Let torch's slower kernel fail."""

    def fail(*_):
        msg = "the slower kernel was called"
        raise AssertionError(msg)

    monkeypatch.setattr(torch, "_foreach_norm", fail)


def exact(tensors, norm_type=2.0):
    return float(torch.linalg.vector_norm(torch.cat([each.reshape(-1).double() for each in tensors]), norm_type))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_that_of_fp64_whatever_the_tensors_are(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 1024), (33, 1025), (7,), (), (0,), (5000,), (1024,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors += [tensors[1].t(), tensors[0][:, ::2], torch.zeros(4096, dtype=dtype)]
    found = float(global_norm(tensors, dtype=torch.float64))
    allowed = {torch.float64: 1e-13, torch.float32: 1e-7}
    assert found == pytest.approx(exact(tensors), rel=allowed.get(dtype, 1e-6))


@pytest.mark.parametrize("value", [1e25, 1e-25, 3e-38])
def test_squares_beyond_fp32_are_counted(value):
    tensors = [torch.full((5000,), value), torch.full((10,), value)]
    assert float(global_norm(tensors, dtype=torch.float64)) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024, 1029])
def test_what_is_not_finite_shows(value, place):
    tensor = torch.ones(1030)
    tensor[place] = value
    norm = float(global_norm([torch.ones(2048), tensor]))
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_zeros_have_no_norm():
    assert float(global_norm([torch.zeros(3000), torch.zeros(3)])) == 0.0


@pytest.mark.usefixtures("without_the_exact_kernel")
def test_gradients_of_whole_rows_take_the_faster_kernels():
    tensors = [torch.full((2, 1024), 2.0), torch.zeros(4096)]
    assert float(global_norm(tensors)) == pytest.approx(exact(tensors), rel=1e-6)
