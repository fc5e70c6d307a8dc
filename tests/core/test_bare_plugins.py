"""What a plugin that only extends core's `Plugin` can't train rightly is refused by core, on every rank."""

import peft
import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError, PluginError
from booster_core.plugin import Capability, ModelWrapper, OptimizerWrapper, Plugin
from booster_core.ranks import DistCoordinator
from booster_testing import expect_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors


class Bare(Plugin):
    name = "bare"
    api_version = 2
    capabilities = frozenset({Capability.CPU, Capability.FP32, Capability.DATA_PARALLEL})

    def configure(self, objects, context):
        optimizer = objects.optimizer and OptimizerWrapper(objects.optimizer, context=context)
        return objects._replace(model=ModelWrapper(objects.model), optimizer=optimizer)


def boost(make_model, dataloader=None):
    model = make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Booster("cpu", plugin=Bare()).boost(model, torch.optim.SGD(trained, lr=0.1), dataloader=dataloader)


def make_linear():
    return nn.Sequential(nn.Linear(4, 2))


def make_without_values():
    with torch.device("meta"):
        return make_linear()


def make_on_one_rank_without_values():
    return make_without_values() if DistCoordinator().rank else make_linear()


@pytest.mark.parametrize("make_model", [make_without_values, make_on_one_rank_without_values])
@raises_on_ranks(ConfigError, r"have no values, such as '0\.weight'.*`Capability\.LAZY_INIT`", 2)
def test_a_model_without_values_is_refused(make_model):
    boost(make_model)


@raises_on_ranks(ConfigError, r"'bare' does not train adapters.*`Capability\.LORA`", 2)
def test_a_model_with_adapters_is_refused():
    boost(lambda: peft.get_peft_model(make_linear(), peft.LoraConfig(target_modules=["0"])))


@raises_on_ranks(
    ConfigError, r"but 2 ranks were launched: .* Choose a plugin, for example `Booster\(plugin='ddp'\)`", 2
)
def test_several_ranks_need_a_plugin():
    Booster("cpu").boost(make_linear())


@raises_on_ranks(PluginError, "split", 2)
def test_a_loader_that_stays_whole_is_refused():
    boost(make_linear, DataLoader(torch.ones(8, 4), batch_size=2))


@on_ranks(2)
def test_a_loader_that_is_split_is_left_to_the_user():
    data = torch.ones(8, 4)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    assert sum(len(batch) for batch in boost(make_linear, loader).dataloader) == 4


def train_apart_and_save(plugin, save, folder):
    torch.manual_seed(0)
    model = nn.Linear(600, 600)  # of more than one MiB: each rank writes a part
    booster = Booster("cpu", plugin=plugin)
    boosted = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        booster.backward(boosted.model(torch.full((2, 600), 1.0 + dist.get_rank())).square().mean(), boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    if save == "save_checkpoint":
        booster.save_checkpoint(folder, step=1, model=boosted.model, optimizer=boosted.optimizer)
    else:
        what = save.removeprefix("save_")
        getattr(booster, save)(getattr(boosted, what), f"{folder}/{what}.safetensors")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("save", ["save_model", "save_optimizer", "save_checkpoint"])
def test_replicas_that_differ_are_not_written(save, tmp_path):
    """Each rank writes a part, so the file would be a mixture of ranks."""
    match = rf"`{save}` would write a mixture: .*'weight'.*Plugin 'bare' .*`Plugin.prepare_save`"
    expect_on_ranks(CheckpointError, match, train_apart_and_save, 2, Bare(), save, str(tmp_path))
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_replicas_that_were_made_equal_are_written(tmp_path):
    class Averaging(Bare):
        """Averages parameters and momentum before a save."""

        def prepare_save(self, model, context):
            states = model.boosted_optimizer.state.values()
            for tensor in [*model.parameters(), *(state["momentum_buffer"] for state in states)]:
                dist.all_reduce(tensor.detach())
                tensor.detach().div_(dist.get_world_size())

    saved = train_apart_and_save(Averaging(), "save_model", tmp_path)
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), saved, EXACT)
