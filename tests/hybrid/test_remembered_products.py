"""Products that a probe takes from memory are those that would be computed."""

from __future__ import annotations

import torch
from torch import nn

from booster_hybrid.probe.running import RememberedProducts


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def run(weight, bias, source):
    source = source.clone().requires_grad_()
    hidden = nn.functional.linear(source, weight, bias)
    back = hidden @ weight.narrow(0, 0, len(weight))
    (gradient,) = torch.autograd.grad(back.square().sum(), source)
    return back.detach(), gradient


def test_each_product_is_computed_once():
    weight, bias, source = (torch.randn(shape, dtype=torch.float64) for shape in ((1100, 1000), (1100,), (2, 3, 1000)))
    other = torch.randn_like(source)
    expected = [run(weight, bias, each) for each in (source, other)]
    with Counted() as counted, RememberedProducts([weight]) as products:
        first = run(weight, bias, source)
        once = counted.count
        again = run(weight, bias, source)
        assert counted.count == once == 4
        second = run(weight, bias, other)
    torch.testing.assert_close([first, second], expected)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    weight.mul_(2)
    with products:
        changed = run(weight, bias, source)
    torch.testing.assert_close(changed, run(weight, bias, source))


def test_who_gets_a_product_may_write_to_it():
    weight, rows = torch.randn(1100, 1000), torch.randn(4, 1100)
    with RememberedProducts([weight]):
        first = rows @ weight
        expected = first.clone()
        first.zero_()
        second = rows @ weight
        assert torch.equal(second, expected)
        assert torch.equal(torch.zeros(4, 1000).addmm_(rows, weight), expected)


def test_other_matrices_are_computed_each_time():
    small, trained, rows = torch.randn(8, 8), torch.randn(1100, 1000, requires_grad=True), torch.randn(4, 1100)
    with Counted() as counted, RememberedProducts([small, trained]):
        for _ in range(2):
            rows[:, :8] @ small
            rows @ trained
    assert counted.count == 4
