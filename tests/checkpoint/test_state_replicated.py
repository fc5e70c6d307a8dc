"""The adapter for replicated state: names, ties, ownership, and the state of every optimizer and scheduler of torch."""

import copy
import json

import pytest
import torch
from engine_calls import EngineCalls
from torch import nn
from torch.optim import lr_scheduler as lrs

from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import ModelWrapper, OptimizerWrapper
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter, balanced_shards


class Net(nn.Module):
    """A tied head, a repeated layer, a shared memory, buffers of both kinds, extra state, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("table", torch.arange(3))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "seen": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state):
        self.calls = state["calls"]
        assert state["seen"].tolist() == [self.calls] * 2

    def forward(self, x):
        self.calls += 1
        return self.head(self.norm(self.again(self.layer(self.embed(x)))))


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        torch.manual_seed(0)
        loss = model(torch.tensor([0, 1, 2, 3, 4, 5])).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def adapter_of(model, optimizer=None):
    return ReplicatedStateAdapter(model, optimizer, DistCoordinator())


def test_names_are_those_of_state_dict_and_ties_are_listed_once():
    model = Net()
    adapter = adapter_of(model)
    names = [shard.name for shard in adapter.model_shards()]
    assert len(set(names)) == len(names)
    in_state_dict = {name for name in model.state_dict() if "_extra_state" not in name}
    assert {*names, *adapter.tied_names()} == in_state_dict
    assert adapter.tied_names() == {
        "again.weight": "layer.weight",
        "again.bias": "layer.bias",
        "head.weight": "embed.weight",
    }


def test_parameters_that_share_memory_are_tied_as_well():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    assert adapter_of(model).tied_names() == {"b.weight": "a.weight"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.compile imports what it deprecates
def test_wrappers_do_not_change_names():
    model = Net()
    expected = [shard.name for shard in adapter_of(model).model_shards()]
    optimizer = torch.optim.SGD(model.parameters())
    for wrapped in (ModelWrapper(model), torch.compile(model), ModelWrapper(nn.DataParallel(model), model)):
        adapter = adapter_of(wrapped, OptimizerWrapper(optimizer))
        assert [shard.name for shard in adapter.model_shards()] == expected
        assert adapter.param_groups()[0].params == tuple(dict(model.named_parameters()))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_element_is_owned_once_and_bytes_are_balanced(world_size):
    shapes = [(1 << 20,), (3,), (0,), (), (700, 1000), (1 << 19, 2)]
    tensors = [(f"t{index}", None, torch.zeros(shape)) for index, shape in enumerate(shapes)]
    owned = {name: torch.zeros(tensor.numel()) for name, _, tensor in tensors}
    sizes = []
    for rank in range(world_size):
        size = 0
        for shard in balanced_shards(tensors, rank, world_size):
            if shard.is_owner:
                start, stop = shard.flat_range
                owned[shard.name][start:stop] += 1
                size += shard.numel
        sizes.append(size)
    assert all(counts.eq(1).all() for counts in owned.values())
    assert max(sizes) - min(sizes) <= 2 * (1 << 18), "no more than the tensors that are not cut"


def test_a_parameter_that_the_model_lacks_is_refused():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), other.weight])
    with pytest.raises(
        ConfigError, match=r"Parameters \[2\] of the optimizer's group 0 are not parameters of the model"
    ):
        adapter_of(model, optimizer)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_run_goes_on_bit_for_bit(kind, tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        step(model, optimizer)
    io = EngineCalls()
    adapter = adapter_of(model, optimizer)
    io.save_model(adapter, tmp_path, shard=True)
    io.save_optimizer(adapter, tmp_path, shard=True)

    other = Net()
    fresh = OPTIMIZERS[kind]([p for p in other.parameters() if p.requires_grad])
    loaded = adapter_of(other, fresh)
    assert io.load_model(loaded, tmp_path).is_complete
    io.load_optimizer(loaded, tmp_path)
    assert other.calls == model.calls
    torch.testing.assert_close(fresh.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    for _ in range(2):
        step(model, optimizer)
        step(other, fresh)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_groups_keep_their_options_and_a_tensor_lr_its_object(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    rate = torch.tensor(0.5)
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[1].parameters(), "weight_decay": 0.25}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    io = EngineCalls()
    io.save_optimizer(adapter_of(model, optimizer), tmp_path / "o", shard=True)
    rate.fill_(0.0)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    io.load_optimizer(adapter_of(model, optimizer), tmp_path / "o")
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


def test_state_that_the_checkpoint_lacks_is_dropped(tmp_path):
    model = Net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    io = EngineCalls()
    io.save_optimizer(adapter_of(model, optimizer), tmp_path / "o", shard=True)
    step(model, optimizer)
    io.load_optimizer(adapter_of(model, optimizer), tmp_path / "o")
    assert not optimizer.state


def test_masters_become_parameters_where_there_are_none(tmp_path):
    model = nn.Linear(3, 2)
    with_masters = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        with_masters.state[parameter] = {"master": torch.full_like(parameter, 1 / 3)}
    io = EngineCalls()
    io.save_optimizer(adapter_of(model, with_masters), tmp_path / "o", shard=True)
    other = nn.Linear(3, 2)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    io.load_optimizer(adapter_of(other, plain), tmp_path / "o")
    assert all(parameter.eq(1 / 3).all() for parameter in other.parameters())
    assert not plain.state


def test_fp32_state_of_bf16_parameters_stays_fp32(tmp_path):
    """As Adafactor of transformers keeps it."""
    runs = []
    for value in (1 / 3, 0.0):
        model = nn.Linear(3, 2).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"momentum": torch.full(parameter.shape, value)}
        runs.append(adapter_of(model, optimizer))
    io = EngineCalls()
    io.save_optimizer(runs[0], tmp_path / "o", shard=True)
    io.load_optimizer(runs[1], tmp_path / "o")
    for state in optimizer.state.values():
        assert torch.equal(state["momentum"], torch.full(state["momentum"].shape, 1 / 3))


def test_state_that_has_no_json_form_is_named(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"helper": object()}
    with pytest.raises(CheckpointError, match=r"state of 'weight' cannot be saved: 'helper' is a builtins\.object"):
        EngineCalls().save_optimizer(adapter_of(model, optimizer), tmp_path / "o", shard=True)


@pytest.mark.parametrize("layout", ["transposed", "expanded-buffer", "channels_last"])
def test_tensors_of_any_strides(layout, tmp_path):
    model = nn.Module()
    torch.manual_seed(0)
    data = {
        "transposed": torch.randn(5, 3).T,
        "expanded-buffer": torch.randn(3, 5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }[layout]
    model.weight = nn.Parameter(data)
    model.register_buffer("stripe", torch.randn(4, 6)[:, ::2])
    other = copy.deepcopy(model)
    other.weight.data.zero_()
    other.stripe.zero_()
    io = EngineCalls(bucket_bytes=1024)
    io.save_model(adapter_of(model), tmp_path / "m.safetensors")
    io.load_model(adapter_of(other), tmp_path / "m.safetensors")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.stripe, model.stripe)
    assert other.weight.stride() == model.weight.stride()


# ---- learning rate schedulers of every kind go on from their JSON as if never interrupted

SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def scheduled(kind):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return optimizer, SCHEDULERS[kind](optimizer)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_loaded_scheduler_goes_on(kind, tmp_path):
    def advance(steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    io = EngineCalls()
    optimizer, scheduler = scheduled(kind)
    advance(3)
    io.save_lr_scheduler(scheduler, tmp_path / "s.json")
    rate = optimizer.param_groups[0]["lr"]
    expected = advance(5)
    json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)

    optimizer, scheduler = scheduled(kind)
    io.load_lr_scheduler(scheduler, tmp_path / "s.json")
    optimizer.param_groups[0]["lr"] = rate  # which the optimizer's own checkpoint holds
    assert advance(5) == expected


def test_the_state_of_another_kind_is_refused(tmp_path):
    io = EngineCalls()
    io.save_lr_scheduler(scheduled("StepLR")[1], tmp_path / "s.json")
    with pytest.raises(CheckpointError, match="holds the state of a StepLR; this scheduler is a LambdaLR"):
        io.load_lr_scheduler(scheduled("LambdaLR")[1], tmp_path / "s.json")


@pytest.mark.parametrize(("content", "match"), [("{", "is not valid JSON"), ("[]", "does not hold a learning rate")])
def test_other_files_are_refused(content, match, tmp_path):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(CheckpointError, match=match):
        EngineCalls().load_lr_scheduler(scheduled("StepLR")[1], tmp_path / "s.json")
