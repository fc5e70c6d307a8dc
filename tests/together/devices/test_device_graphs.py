"""CUDA graphs: a replay would repeat kernels without a plugin's Python, so calls refuse to be captured."""

import contextlib
from unittest import mock

import pytest
import torch
from device_smoke import CASES, make_plugin
from simulated_device import NAME, on_devices
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError


@contextlib.contextmanager
def capturing():
    """Let the stream seem to be captured."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 1", "gemini", "pipeline"])
@on_devices(1)
def test_calls_in_a_capture_raise_and_change_nothing(name, simulated_device):
    case = CASES[name]
    options = {name: value for name, value in case.options.items() if name not in ("pp_size", "num_microbatches")}

    def losses(calls_in_captures):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        booster = Booster(NAME, plugin=make_plugin(case.plugin, options))
        model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        x = torch.ones(2, 4, device=NAME)
        for _ in range(3):
            loss = model(x).square().mean()
            calls = (
                lambda: model(x),
                lambda loss=loss: booster.backward(loss, optimizer),
                lambda: optimizer.clip_grad_by_norm(1.0),
                optimizer.step,
            )
            for call in calls if calls_in_captures else ():
                with capturing(), pytest.raises(ConfigError, match="while a CUDA graph is captured"):
                    call()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    assert [*losses(True)] == [*losses(False)]


@on_devices(2)
def test_parameters_are_not_gathered_in_a_capture(simulated_device):
    """Call a layer of a model whose parameters are gathered for it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    booster = Booster(NAME, plugin=make_plugin("gemini", {}))
    model, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    layer, x = booster.unwrap(model.eval())[0], torch.ones(2, 4, device=NAME)
    with torch.no_grad():
        expected = layer(x).tolist()
        with (
            capturing(),
            pytest.raises(ConfigError, match="`gather of parameters` was called while a CUDA graph is captured"),
        ):
            layer(x)
        assert layer(x).tolist() == expected
