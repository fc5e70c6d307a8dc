"""Where one rank has everything: each gradient is copied once, and a model that calls itself trains as alone."""

import pytest
import torch
from ranked import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.plugin import load
from booster_testing import run_on_ranks

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._foreach_copy_.default, aten.clone.default, aten._to_copy.default, aten.cat.default}


class Copied(TorchDispatchMode):
    """Counts the elements that operations copy."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            written = args[0] if func is aten._foreach_copy_.default else [result]
            self.numel += sum(each.numel() for each in written)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["zero", "gemini"])
@on_ranks(1)
def test_a_step_copies_each_gradient_once(name, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(dtype)
    numel = sum(parameter.numel() for parameter in model.parameters())
    booster = Booster(plugin=load(name)(master_weights=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.ones(2, 64, dtype=dtype)
    for step in range(8):
        copied = Copied()
        loss = model(x).square().mean()
        with copied:
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert step < 7 or copied.numel >= numel, "each gradient, once"
    copied = copied.numel / numel
    assert copied < 1.1


class CallsItself(nn.Module):
    """Runs itself inside of its forward, as often as it is told; raises at the end if it is told to."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x, depth, *, raises=False):
        inner = self.inner(x) if depth % 2 else checkpoint(self.inner, x, use_reentrant=False)
        if depth:
            return self(inner * self.scale, depth - 1, raises=raises) + self.inner(x) * self.scale
        if raises:
            raise KeyError
        return inner


def trained_by_itself(name, calls_backward):
    """Return the parameters after each step, some of which a failed forward precedes."""
    torch.manual_seed(0)
    model = CallsItself()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole, backward, values = model.state_dict, lambda loss: loss.backward(), []
    if name is not None:
        booster = Booster(plugin=load(name)())
        model, optimizer, *_ = booster.boost(model, optimizer)
        whole = model.state_dict
        if not calls_backward:
            backward = lambda loss: booster.backward(loss, optimizer)  # noqa: E731
    for step in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        if step % 2:
            with pytest.raises(KeyError):
                model(x, 2, raises=True)
        backward(model(x, 2).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        values.append({key: value.clone() for key, value in whole().items()})
    return values


@pytest.mark.parametrize("calls_backward", [False, True], ids=["booster", "script"])
@pytest.mark.parametrize("name", ["zero", "gemini"])
def test_a_model_that_calls_itself_and_raises_trains_as_alone(name, calls_backward):
    (ours,) = run_on_ranks(trained_by_itself, 1, name, calls_backward)
    for of_step, expected in zip(ours, trained_by_itself(None, True), strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(of_step[key], value)
