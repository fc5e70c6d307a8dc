"""A model that several optimizers train, each a part of it: compared with plain torch in one process.

Muon for the matrices and AdamW for the rest is what Muon's authors train transformers by, and what two optimizers of
one model are used for most.
"""

import math
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, in_fp64, train_plainly
from driven_runs import assert_same_loop
from matrix import matrix
from plugin_runs import runs
from ranked import on_ranks
from torch import nn

from booster_core import Booster, LossScaleConfig, PrecisionPolicy
from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_runtime import LazyInitContext, full_gradient, set_full_gradient, train_batch
from booster_testing.compare import assert_same_tensors
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

STEPS, MAX_NORM = 4, 0.5
SETTINGS = {
    **runs("single", "ddp", "fsdp"),
    "zero-1": Setting(LowLevelZeroPlugin, {"bucket_bytes": 2048}),
    "zero-2": Setting(LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 2048, "overlap_allgather": True}),
    "zero-2, offloaded": Setting(LowLevelZeroPlugin, {"stage": 2, "cpu_offload": True}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 1024}),
    "gemini, offloaded": Setting(
        GeminiPlugin,
        {
            "min_chunk_bytes": 1024,
            "offload_param_frac": 1.0,
            "offload_optim_frac": 1.0,
            "offload_dir": tempfile.gettempdir(),
        },
    ),
    "gemini, replicas": Setting(GeminiPlugin, {"min_chunk_bytes": 1024, "replica_size": 2}),
}
SHARDED = [name for name in SETTINGS if name.startswith(("zero", "gemini"))]


class Transformer(nn.Module):
    """A language model of two layers, in which a parameter of each kind is."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            # A bias of keys has no gradient but roundings, which AdamW makes into steps.
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def muon_and_adamw(model):
    matrices = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    held = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]


def rows(number, replica):
    return torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(10 * number + replica))


def decay(step, _model, optimizers):
    """Do before each step but the first what a scheduler of each optimizer does after a step."""
    for each in optimizers if step else ():
        for group in each.param_groups:
            group["lr"] *= 0.9


PLAIN = Case(build=partial(in_fp64, Transformer), batch=rows, optimizer=muon_and_adamw, steps=STEPS, max_norm=MAX_NORM)
"""In fp64, as Muon's steps in bf16 make much of other roundings in fp32."""


def make(dtype=torch.float64):
    model, _ = PLAIN.make()
    model = model.to(dtype)
    return model, muon_and_adamw(model)


@matrix(["fsdp", "zero-2, offloaded", "gemini, replicas"], plugin=SETTINGS)
def test_training_equals_one_process_through_a_checkpoint(plugin, tmp_path):
    """Each optimizer in turn clips, by the norm of the whole model."""
    assert_equals_one_process(replace(PLAIN, before_step=decay), SETTINGS[plugin], checkpoint=tmp_path / "run")


@pytest.mark.parametrize("plugin", ["zero-1", "gemini"])
@on_ranks(2)
def test_a_lazy_model_and_a_scheduler_of_each_train_as_in_one_process(plugin, tmp_path):
    """Train a lazy model with schedulers, save it in the end, and load it."""
    booster = SETTINGS[plugin].make_booster()
    with LazyInitContext():
        model, optimizers = make()
    schedulers = tuple(torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers)
    model, boosted, _, _, steered = booster.boost(model, optimizers, lr_scheduler=schedulers)
    assert type(boosted) is list
    assert steered == schedulers
    assert [each.unwrap() for each in boosted] == optimizers
    for step in range(STEPS):
        booster.backward(model(rows(step, DistCoordinator().rank)).square().mean(), boosted[step % 2])
        boosted[step % 2].clip_grad_by_norm(MAX_NORM)
        for each in boosted:  # one after the other: what one drops is not the other's
            each.step()
            each.zero_grad()
        for each in steered:
            each.step()
    booster.save_checkpoint(tmp_path / "run", model=model, optimizer=boosted, lr_scheduler=steered, step=STEPS)
    other, optimizers = make()
    schedulers = tuple(torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers)
    other, boosted, _, _, steered = booster.boost(other, tuple(optimizers), lr_scheduler=schedulers)
    assert type(boosted) is tuple
    booster.load_checkpoint(tmp_path / "run", model=other, optimizer=boosted, lr_scheduler=steered)
    assert [each.get_last_lr() for each in steered] == [[pytest.approx(rate * 0.9**STEPS)] for rate in (0.02, 0.05)]
    expected = train_plainly(replace(PLAIN, before_step=decay), 2).parameters
    for each in (model, other):
        assert_same_tensors(whole_model(booster, each), expected, PLAIN.tolerance)


@matrix(["fsdp", "zero-2", "gemini"], plugin=SETTINGS)
@on_ranks(lambda plugin: SETTINGS[plugin].num_ranks)
def test_train_batch_steps_all_of_them(plugin):
    booster = SETTINGS[plugin].make_booster()
    model, optimizers = make()
    model, boosted, *_ = booster.boost(model, optimizers)
    coordinator = DistCoordinator()
    for step in range(STEPS):
        train_batch(
            booster,
            iter([(part,) for part in rows(step, coordinator.rank).chunk(2)]),
            model,
            lambda outputs, _: outputs.square().mean(),
            boosted,
            accumulation=2,
            max_norm=MAX_NORM,
        )
    expected = train_plainly(PLAIN, coordinator.world_size).parameters
    assert_same_tensors(whole_model(booster, model), expected, PLAIN.tolerance)


@matrix(1, plugin=[name for name in SETTINGS if "replicas" not in name], overflowing=[0, 1])
@on_ranks(1)
def test_an_overflow_in_one_skips_the_step_of_all(plugin, overflowing):
    config = LossScaleConfig(initial_scale=8.0, growth_interval=2)
    precision = PrecisionPolicy(compute_dtype=torch.float16, loss_scale=config)
    booster = replace(SETTINGS[plugin], precision=precision).make_booster()
    model, optimizers = make(torch.float32)
    model, boosted, *_ = booster.boost(model, optimizers)
    watched = ["layers.0.linear1.weight", "scale"]  # of Muon, of AdamW
    found = []
    for step in range(3):
        before = whole_model(booster, model)
        booster.backward(model(rows(step, 0)).square().mean(), boosted)
        if step == 0:
            name = watched[overflowing]
            set_full_gradient(booster, model, name, torch.full_like(full_gradient(booster, model, name), math.inf))
        for each in boosted:
            each.step()
        for each in boosted:
            each.zero_grad()
        after = whole_model(booster, model)
        found.append(([not torch.equal(before[name], after[name]) for name in watched], boosted[0].loss_scaler.scale))
    is_shared = boosted[0].loss_scaler is boosted[1].loss_scaler
    assert found == [([False, False], 4.0), ([True, True], 4.0), ([True, True], 8.0)]
    assert is_shared


@on_ranks(2)
def test_a_checkpoint_has_the_state_of_all_or_none(tmp_path):
    booster = Booster("cpu", plugin="ddp")
    model, optimizers = make()
    model, boosted, *_ = booster.boost(model, optimizers)
    with pytest.raises(ConfigError, match="got 1 of the 2 optimizers"):
        booster.save_checkpoint(tmp_path, model=model, optimizer=boosted[0], step=1)
    with pytest.raises(ConfigError, match="got 1 of the 2 optimizers"):
        booster.save_optimizer(boosted[1], tmp_path / "optimizer")
    booster.save_optimizer(boosted, tmp_path / "optimizer")
    booster.load_optimizer(boosted, tmp_path / "optimizer")


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp", "zero-2"), ("zero-1", "ddp"), ("ddp", "gemini"), ("gemini", "fsdp")]
)
def test_a_checkpoint_moves_between_plugins(source, target, tmp_path):
    assert_equals_one_process(PLAIN, SETTINGS[source], checkpoint=tmp_path / "run", then=SETTINGS[target])


def one_adds_up(run):
    """Step the first optimizer each time, and the second on the sum of every two gradients."""
    muon, adamw = run.optimizer
    for step in range(STEPS):
        run.backward(run.loss(step))
        muon.step()
        muon.zero_grad()
        if step % 2:
            adamw.step()
            adamw.zero_grad()


@pytest.mark.parametrize("plugin", ["ddp", *SHARDED])
def test_one_steps_while_the_other_adds_up(plugin):
    assert_same_loop(one_adds_up, PLAIN, SETTINGS[plugin])


def late(model):
    """Return optimizers of which none lists the head, which belongs to the second one later."""
    muon, adamw = muon_and_adamw(model)
    head = {id(parameter) for parameter in model.head.parameters()}
    group = adamw.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in head]
    return [muon, adamw]


def lists_the_head(step, model, optimizers):
    model.zero_grad()  # also what no group holds
    if step == 1:
        optimizers[1].add_param_group({"params": [*model.head.parameters()], "lr": 0.1})
        if dist.is_initialized():
            with pytest.raises(ConfigError, match=r"'head.weight' is in a parameter group already"):
                optimizers[0].add_param_group({"params": [model.head.weight]})


@pytest.mark.parametrize("plugin", ["zero-1", "gemini"])
def test_a_parameter_joins_an_optimizer_that_takes_it_in_another_way(plugin):
    case = replace(PLAIN, optimizer=late, before_step=lists_the_head, max_norm=None)
    assert_equals_one_process(case, SETTINGS[plugin])


def test_a_parameter_belongs_to_one():
    model, _ = make()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.scale], lr=0.1)]
    with pytest.raises(ConfigError, match="in two of the optimizers, such as 'scale' in those at 0 and 1"):
        Booster("cpu").boost(model, twice)
