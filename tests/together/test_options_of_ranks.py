"""Ranks that built their plugin with other options are told so by `boost`, on every rank; folders may differ.

So are ranks whose optimizers come to have other settings, by the next step that all take.
"""

from types import SimpleNamespace

import pytest
import torch
from matrix import matrix
from plugin_runs import step
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePlugin
from torch import nn

from booster_core import Booster, DistCoordinator, LossScaleConfig, PrecisionPolicy
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import reduce
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin


def boost(plugin):
    model = nn.Linear(4, 4)
    Booster("cpu", plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return True


@raises_on_ranks(ConfigError, "Ranks disagree about `bucket_bytes`: 4096 on rank 0, 8192 on rank 1, in `boost`", 2)
def test_options_that_differ_between_ranks_are_refused():
    boost(LowLevelZeroPlugin(bucket_bytes=4096 * (1 + DistCoordinator().rank)))


@on_ranks(2)
def test_folders_may_differ(tmp_path):
    own = tmp_path / str(DistCoordinator().rank)
    own.mkdir()
    assert boost(GeminiPlugin(offload_optim_frac=1.0, offload_dir=own))


@on_ranks(2)
def test_an_option_that_cannot_be_copied_is_compared():
    from torch.distributed import group
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    assert boost(TorchDDPPlugin(comm_hook=allreduce_hook, comm_hook_state=group.WORLD))


def rate_on_one(run):
    if run.rank:
        run.optimizer.param_groups[1]["lr"] = 0.025


def rate_and_use_on_one(run):
    rate_on_one(run)
    if run.rank:  # as where a batch has no token that a parameter is for
        norm = run.model.unwrap().model.norm
        norm.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], eps=norm.variance_epsilon)


def scheduler_on_one(run):
    if run.rank == 0:
        run.scheduler.step(torch.tensor(1.0))


def betas_of_each(run):
    run.optimizer.param_groups[0]["betas"] = (0.5, 0.9 + run.rank / 100)


CHANGES = {
    "rate on one": (rate_on_one, r"`lr of group 1`: 0\.1\d* on rank 0, 0\.025 on rank 1, in `step`.*reduce\(booster, "),
    "rate and use on one": (rate_and_use_on_one, r"`lr of group 1`: 0\.1\d* on rank 0, 0\.025 on rank 1, in `step`"),
    "scheduler on one": (scheduler_on_one, r"`lr of group 0`: 0\.05 on rank 0, 0\.1 on rank 1; `lr of group 1`"),
    "betas of each": (betas_of_each, r"`betas of group 0`: \(0\.5, 0\.9\) on rank 0, \(0\.5, 0\.91\) on rank 1"),
}
FP16 = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=2.0))
STRATEGIES = {
    "third party": ReferencePlugin,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero-1": LowLevelZeroPlugin,
    "zero-2": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": GeminiPlugin,
    # Norms and overflows are told between ranks before the step, also by ranks that have trained or used less.
    "zero-1 clipped": lambda: LowLevelZeroPlugin(max_norm=1.0),
    "zero-1 fp16": lambda: LowLevelZeroPlugin(precision=FP16, max_norm=1.0),
    "gemini clipped": lambda: GeminiPlugin(max_norm=1.0),
    "gemini fp16": lambda: GeminiPlugin(precision=FP16, max_norm=1.0),
    "tp": lambda: HybridParallelPlugin(tp_size=2),
    "pp": lambda: HybridParallelPlugin(pp_size=2, zero_stage=0),
}


def change_settings(name, change, plugin=None):
    """Take steps, between the first and the second of which settings change."""
    torch.manual_seed(0)
    model, booster = tiny_llama(), Booster("cpu", plugin=plugin or STRATEGIES[name]())
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.best = 0.5
    model, optimizer, *_ = booster.boost(model, optimizer)
    run = {"booster": booster, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    for number in range(3):
        tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(number))
        step(booster, model, optimizer, {"input_ids": tokens, "labels": tokens})
        if number == 0:
            change(SimpleNamespace(**run, rank=DistCoordinator().rank))


@matrix(
    [f"{name}-rate on one" for name in STRATEGIES]
    + ["zero-1 clipped-rate and use on one", "zero-1 fp16-rate and use on one"]
    + ["zero-1-scheduler on one", "fsdp-betas of each"],
    name=list(STRATEGIES),
    change=list(CHANGES),
)
@on_ranks(2)
def test_settings_that_come_to_differ_are_refused_by_the_next_step(name, change):
    function, message = CHANGES[change]
    searches = (name, change) == ("ddp", "rate and use on one")  # or the next backward waits for what rank 1 leaves out
    plugin = TorchDDPPlugin(find_unused_parameters=True) if searches else None
    with pytest.raises(ConfigError, match=message):
        change_settings(name, function, plugin)


FREEZING = ["third party", "zero-1", "gemini", "zero-1 clipped", "zero-1 fp16", "gemini clipped", "gemini fp16"]


@pytest.mark.parametrize("name", FREEZING)
@raises_on_ranks(
    ConfigError,
    r"`'model.norm.weight' is trained`: True on rank 0, False on rank 1, in `step`.*Freeze and unfreeze alike",
    2,
)
def test_parameters_that_are_frozen_on_some_ranks_are_named_by_the_next_step(name):
    change_settings(name, lambda run: run.model.unwrap().model.norm.weight.requires_grad_(run.rank == 0))


@matrix(1, name=list(STRATEGIES))
@on_ranks(2)
def test_settings_that_change_alike_are_let_be(name):
    change_settings(name, lambda run: run.scheduler.step(reduce(run.booster, torch.tensor(1.0 - run.rank))))
