"""What a replica group takes over of another one: all of it, or nothing where that trains another model."""

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_ft.state import GroupState


def trained(width, rate, names=("a", "b"), schedulers=1):
    """Return a model after a step, its optimizer and its state."""
    torch.manual_seed(width)
    model = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    sum(layer(torch.ones(width)).sum() for layer in model.values()).backward()
    optimizer.step()
    made = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for _ in range(schedulers)]
    coordinator = DistCoordinator()
    state = GroupState(lambda: ReplicatedStateAdapter(model, optimizer, coordinator), None, made, (), coordinator, 0)
    return model, optimizer, state


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 4}, "no 'a.bias', 'a.weight', .* of the shape and dtype"),
        ({"names": ("a", "c")}, "other parameter groups, schedulers or precision"),
        ({"schedulers": 2}, "other parameter groups, schedulers or precision"),
    ],
)
def test_another_training_is_refused_before_anything_changes(other, message):
    ours, optimizer, state = trained(3, 0.1)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    *_, received = trained(**{"width": 3, "rate": 0.7, **other})
    with pytest.raises(ConfigError, match=message):
        state.restore(received.capture(), 5, is_new=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1
