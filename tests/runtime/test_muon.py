"""Muon on stacks of matrices: torch's Muon on each of them."""

from itertools import pairwise

import pytest
import torch

from booster_core.errors import ConfigError
from booster_runtime import Muon
from booster_runtime.muon import update_cost
from booster_runtime.sharding import is_by_matrix, partition_for

SETTINGS = {
    "default": {},
    "heavy ball": {"nesterov": False, "momentum": 0.5, "ns_steps": 3},
    "rms": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", [(4, 16, 24), (3, 24, 16), (5, 8, 8)])
def test_each_matrix_of_a_stack_is_updated_as_by_torchs_class(shape, settings):
    generator = torch.Generator().manual_seed(3)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(5))
    stack = torch.nn.Parameter(start.clone())
    matrices = [torch.nn.Parameter(each.clone()) for each in start]
    ours, theirs = Muon([stack], lr=0.1, **settings), torch.optim.Muon(matrices, lr=0.1, **settings)
    for gradient in gradients:
        stack.grad = gradient.clone()
        for matrix, part in zip(matrices, gradient, strict=True):
            matrix.grad = part.clone()
        ours.step()
        theirs.step()
        assert torch.equal(stack.grad, gradient)
    # norms are rounded to bf16, of which the last bit is 2**-8, each in its own order of additions
    torch.testing.assert_close(stack.detach(), torch.stack([each.detach() for each in matrices]), rtol=0, atol=2e-3)
    moved = (stack - start).abs().mean()
    assert moved > 0.02


def test_the_cost_of_a_stack_is_that_of_its_matrices():
    assert update_cost((8, 16, 64)) == 8 * update_cost((16, 64)) == 8 * update_cost((64, 16))
    assert update_cost((16, 64)) == 16 * 16 * (2 * 64 + 16)
    assert all(small < large for small, large in pairwise(map(update_cost, [(4, 4), (4, 8), (8, 8), (2, 8, 8)])))


def test_ranks_step_on_whole_parameters():
    for kind in (Muon, torch.optim.Muon):
        optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])
        assert is_by_matrix(optimizer)
        assert partition_for(optimizer, "auto") == "parameter"
    assert not is_by_matrix(torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))]))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2)])
def test_other_dimensions_are_refused(shape):
    optimizer = Muon([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ConfigError, match=r"of 2 or 3 dimensions; got a parameter of shape \(.*such as AdamW"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(shape))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match="`lr=-1` is negative"):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], lr=-1)
    with pytest.raises(ConfigError, match="`adjust_lr_fn='none'` is unknown"):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="none")
