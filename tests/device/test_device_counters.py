"""Fused optimizers count steps on the device; the count follows a piece whose state moves between host and device."""

import pytest
import torch
from simulated_device import NAME, run_on_devices
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin


class Checked(torch.optim.AdamW):
    """Refuses a count that is not where the parameter is, as the kernels of CUDA do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for values in group["params"]:
                if values.grad is not None and self.state.get(values):
                    assert self.state[values]["step"].device == values.device
        return super().step(closure)


def make(device):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    return model, Checked(model.parameters(), lr=1e-2, eps=1e-2, fused=True)


def train(fraction):
    batches = [torch.full((4, 64), 0.1 * number) for number in range(1, 5)]
    plugin = GeminiPlugin(offload_optim_frac=fraction, min_chunk_bytes=1 << 12)
    booster = Booster(NAME, plugin=plugin)
    model, optimizer, *_ = booster.boost(*make("cpu"))
    for x in batches:
        booster.backward(model(x.to(NAME)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with model.whole_parameters():
        found = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    plain, by_hand = make("cpu")
    for x in batches:
        plain(x).square().mean().backward()
        by_hand.step()
        by_hand.zero_grad()
    return [(one, other.detach()) for one, other in zip(found, plain.parameters(), strict=True)]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_fused_optimizer_steps_where_half_of_its_state_is_on_the_host(fraction, simulated_device):
    (pairs,) = run_on_devices(train, 1, simulated_device, fraction, timeout_seconds=240.0)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
