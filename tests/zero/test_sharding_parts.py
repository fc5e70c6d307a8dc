import pytest
import torch
from own_optimizers import CountsByGroup
from torch import nn, optim

from booster_zero.engine.optimizer import only, steps_in_parts


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.Adafactor])
def test_torch_keeps_everything_by_parameter(kind):
    assert steps_in_parts(kind(parameters(), lr=0.1))


def test_other_classes_step_on_all_at_once():
    assert not steps_in_parts(CountsByGroup(parameters()))


def test_hooks_that_count_steps_see_one():
    optimizer = optim.SGD(parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    assert not steps_in_parts(optimizer)


def test_groups_list_some_for_a_while_also_when_the_body_raises():
    first, second = parameters()
    optimizer = optim.SGD([{"params": [first, second]}, {"params": []}], lr=0.1)
    listed = optimizer.param_groups[0]["params"]
    seen = []

    def step_only_the_second():
        with only(optimizer, [[second], []]):
            seen.extend(id(each) for each in listed)
            raise KeyError

    with pytest.raises(KeyError):
        step_only_the_second()
    assert seen == [id(second)]
    assert [id(each) for each in listed] == [id(first), id(second)]
