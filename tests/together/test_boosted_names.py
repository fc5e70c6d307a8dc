"""Under every plugin a boosted model's parameters, buffers and classes have the names that the user's model has."""

import torch
from matrix import matrix
from named_plugins import NAMES, plugin_named
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.ranks import DistCoordinator
from booster_testing.models import tiny_llama


def names(plugin, *, compiled=False):
    """Return the names in the user's model, those in the boosted one, and those in its state."""
    torch.manual_seed(0)
    # Which layers to split and where to cut is known of models of transformers.
    plain_layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    user = tiny_llama() if plugin.startswith("hybrid-") else plain_layers
    classes = [(module, type(module), module._get_name()) for module in user.modules()]
    plain = {name for name, _ in user.named_parameters()}, {name for name, _ in user.named_buffers()}
    model = torch.compile(user, backend="eager") if compiled else user
    boosted, *_ = Booster(plugin=plugin_named(plugin)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parameters, buffers = dict(boosted.named_parameters()), dict(boosted.named_buffers())
    assert [id(each) for each in boosted.parameters()] == [id(each) for each in parameters.values()]
    assert all(boosted.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert [name for name, _ in boosted.named_parameters("prefix")] == [f"prefix.{name}" for name in parameters]
    present = {id(module) for module in user.modules()}  # another stage's are gone
    for module, kind, name in classes:
        if id(module) in present:
            assert isinstance(module, kind)
            assert name == module._get_name() == type(module).__name__
    return plain, (set(parameters), set(buffers)), set(boosted.state_dict())


@matrix(["single", "fsdp", "hybrid-tp"], plugin=NAMES)
@on_ranks(lambda plugin: 1 if plugin == "single" else 2)
def test_parameters_buffers_and_classes_are_named_as_in_the_users_model(plugin):
    (parameters, buffers), boosted, state = names(plugin)
    if plugin == "hybrid-pp":  # each stage has its own layers
        assert boosted[0] < parameters
        assert boosted[1] <= buffers
    else:
        assert boosted == (parameters, buffers)
        assert boosted[0] <= state
    assert set.union(*DistCoordinator().all_gather_object(boosted[0])) == parameters


@on_ranks(2)
def test_a_compiled_models_names_are_those_of_the_model_inside():
    plain, boosted, _ = names("ddp", compiled=True)
    assert boosted == plain
