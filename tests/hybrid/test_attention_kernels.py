"""Torch's fused attention operations, as ring attention calls them, are compared with the definition before use."""

import pytest
import torch

from booster_hybrid.sequence_parallel import kernels
from booster_hybrid.sequence_parallel.kernels import agrees_with_definition

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_results():
    agrees_with_definition.cache_clear()
    yield
    agrees_with_definition.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_the_cpu_agree_with_the_definition(dtype):
    assert agrees_with_definition(CPU, dtype)


@pytest.mark.parametrize("wrong", ["outputs", "logarithms", "gradients", "masks"])
def test_kernels_with_other_conventions_are_found(monkeypatch, wrong):
    forward, backward = kernels.attend, kernels.differentiate

    def other_forward(operation, query, key, value, bias, **options):
        found, logarithms = forward(operation, query, key, value, None if wrong == "masks" else bias, **options)
        return found * (2 if wrong == "outputs" else 1), logarithms * (1.5 if wrong == "logarithms" else 1)

    def other_backward(operation, gradient, saved, bias, **options):
        factor = 1.5 if wrong == "gradients" else 1
        return tuple(each * factor for each in backward(operation, gradient, saved, bias, **options))

    monkeypatch.setattr(kernels, "attend", other_forward)
    monkeypatch.setattr(kernels, "differentiate", other_backward)
    assert not agrees_with_definition(CPU, torch.float32)


@pytest.mark.parametrize("operation", ["flash", "efficient"])
def test_operations_of_cuda_take_these_arguments(operation):
    """Without a GPU: torch's own shape functions accept the calls, and return gradients of the inputs' shapes."""
    query = torch.empty(2, 4, 40, 16, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 24, 16, dtype=torch.bfloat16, device="meta")
    outputs, logarithms = kernels.attend(operation, query, key, key, None, is_causal=False, scaling=0.25)
    assert (outputs.shape, logarithms.shape) == (query.shape, query.shape[:-1])
    saved = query, key, key, outputs, logarithms
    found = kernels.differentiate(operation, outputs, saved, None, is_causal=False, scaling=0.25)
    assert [each.shape for each in found] == [query.shape, key.shape, key.shape]
