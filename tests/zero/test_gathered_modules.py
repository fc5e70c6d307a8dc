"""Which modules' parameters can be gathered when they run, and which are gathered together."""

import copy
from unittest import mock

import pytest
import torch
from gathering_plugin import GatheringPlugin
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero.gathering import check_modules


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_modules_without_parameters_are_taken():
    check_modules(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("index", [0, 1])
def test_scripted_modules_with_parameters_are_named(index):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers[index] = torch.jit.script(layers[index])
    with pytest.raises(ConfigError, match=f"Module '{index}' is scripted.*plugin='zero'"):
        check_modules(nn.Sequential(*layers))


WIDTH = 16
LAYER_BYTES = 4 * WIDTH * WIDTH


@on_ranks(2)
@pytest.mark.parametrize(("chunk_bytes", "num_uses"), [(4 * LAYER_BYTES, 1), (2 * LAYER_BYTES, 2), (LAYER_BYTES, 4)])
def test_a_module_whose_parameters_share_a_bucket_gathers_them_once(chunk_bytes, num_uses):
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(2)))
    plain = copy.deepcopy(net)
    booster = Booster("cpu", plugin=GatheringPlugin(chunk_bytes=chunk_bytes))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert len(model.gatherer.layout.buckets) == num_uses
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert torch.allclose(model(x), plain(x), rtol=1e-6), "training goes on in the memory that this has taken"
    # Parts are called alone as well, also those that the model has gathered with others.
    whole, block, layer = (model, plain, num_uses), (net[1], plain[1], (num_uses + 1) // 2), (net[1][0], plain[1][0], 1)
    for part, plain_part, count in (whole, layer, block, whole, layer):
        with mock.patch.object(model.gatherer, "use", wraps=model.gatherer.use) as use:
            loss = part(x).square().mean()
        assert use.call_count == count
        booster.backward(loss, optimizer)
        expected = plain_part(x).square().mean()
        expected.backward()
        assert torch.allclose(loss, expected, rtol=1e-6)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same_tensors(model.state_dict(), plain.state_dict(), tolerance_for(torch.float32))
