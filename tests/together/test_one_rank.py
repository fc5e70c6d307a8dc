"""Where one rank has everything, each gradient is copied once."""

import pytest
import torch
from ranked import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core import Booster
from booster_core.plugin import load

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
