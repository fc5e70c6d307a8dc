"""Statistics of routers under plugins: those of one process, which counts each choice by hand."""

import pytest
import torch
from cases import Setting
from expert_models import batch_of, make
from matrix import matrix, named
from plugin_runs import RUNS, step
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing
from booster_tools.tracking import RouterStatistics, Tracker, track

STEPS = 3
SETTINGS = {
    "ddp": RUNS["ddp"],
    "zero-2": RUNS["zero2"],
    "zero-3": RUNS["zero3"],
    "ep": Setting(HybridParallelPlugin, {"ep_size": 2}),
    "tp dp": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}, 4),
    "ring": Setting(HybridParallelPlugin, {"sp_size": 2, "context_parallel": "ring"}),
    "split_gather": Setting(HybridParallelPlugin, {"tp_size": 2, "sequence_parallel": True}),
    "pp": RUNS["hybrid-pp"],
}


class Kept(Tracker):
    """Keeps what it is given."""

    def __init__(self):
        self.steps = []

    def start(self, step):
        pass

    def log(self, step, values):
        self.steps.append({name: value for name, value in values.items() if name.startswith("router/")})

    def close(self):
        pass


def tracked(name, setting, every, recomputes=False):
    """Train, and return what the tracker of this rank has, and the loads of the last measured step."""
    booster, net = SETTINGS[setting].make_booster(), make(name)
    if recomputes:
        enable_activation_checkpointing(net)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    tracker, meter = Kept(), RouterStatistics(booster, model, every=every, per_expert=True)
    with track(optimizer, tracker, meters=[meter]):
        for number in range(STEPS):
            batch = batch_of(number, index)
            step(booster, model, optimizer, batch)
            model.eval()
            if setting != "pp":
                with torch.no_grad():
                    model(**batch)
            model.train()
    return tracker.steps, {key: load.tolist() for key, load in meter.loads.items()}


def by_hand(name, num_replicas):
    """Return the statistics of each step of one process on the samples of all replicas, token by token."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, steps = {}, []
    for path, module in model.named_modules():
        if "Router" in type(module).__name__:
            found[path] = []
            module.register_forward_hook(lambda _m, _i, out, path=path: found[path].append(out))
    for number in range(STEPS):
        for each in found.values():
            each.clear()
        for replica in range(num_replicas):
            (model(**batch_of(number, replica)).loss / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {}
        for path, outputs in found.items():
            counts, entropies = [0] * 8, []
            for logits, _, chosen in outputs:
                for token, choices in zip(logits, chosen.tolist(), strict=True):
                    for expert in choices:
                        counts[expert] += 1
                    entropies.append(float(torch.distributions.Categorical(logits=token.detach()).entropy()))
            mean = sum(counts) / 8
            values |= {f"router/{path}/max_load": max(counts) / mean, f"router/{path}/min_load": min(counts) / mean}
            values |= {f"router/{path}/load/{expert}": count / mean for expert, count in enumerate(counts)}
            values |= {f"router/{path}/dropped": 0.0, f"router/{path}/entropy": sum(entropies) / len(entropies)}
        steps.append(values)
    return steps


MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")  # GPT-OSS has no tensor plan
PAIRS = [
    (name, key) for name in MODELS for key in SETTINGS if name != "gpt_oss" or "tp_size" not in SETTINGS[key].options
]


@matrix(
    ["mixtral-ddp", "deepseek_v3-ep", "qwen3_moe-pp", "mixtral-ring", "gpt_oss-ep"],
    **{"name, setting": named(PAIRS, str, joint=True)},
)
@on_ranks(lambda setting: SETTINGS[setting].num_ranks, timeout_seconds=120)
def test_values_are_those_that_one_process_counts(name, setting):
    steps, loads = tracked(name, setting, 1)
    (first, loads_of_first), *others = DistCoordinator().all_gather_object((steps, loads))
    assert all(each == ([], loads_of_first) for each in others), "trackers are used on rank 0"
    expected = by_hand(name, 1 if setting in ("ring", "split_gather", "pp") else 2)
    assert [set(each) for each in first] == [set(each) for each in expected]
    for found, plain in zip(first, expected, strict=True):
        assert found == pytest.approx(plain, rel=1e-5)
    assert set(loads) == {key.split("/")[1] for key in expected[-1]}


@on_ranks(1)
def test_steps_between_are_not_measured_and_recomputed_forwards_change_nothing():
    whole, _ = tracked("mixtral", "ddp", 1)
    some, _ = tracked("mixtral", "ddp", 2)
    assert [bool(each) for each in some] == [False, True, False]
    assert some[1] == whole[1]
    again, _ = tracked("mixtral", "ddp", 1, recomputes=True)
    for found, plain in zip(again, whole, strict=True):
        assert found == pytest.approx(plain, rel=1e-6)


def measured(router):
    """Return what is logged of a step of a model that calls a router for its statistics alone."""
    booster, net = Booster("cpu"), nn.Linear(2, 2)
    net.router = router

    def run_router(_, inputs):
        router(*inputs)

    net.register_forward_pre_hook(run_router)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    tracker = Kept()
    with track(optimizer, tracker, meters=[RouterStatistics(booster, model)]):
        booster.backward(model(torch.ones(8, 2)).sum(), optimizer)
        optimizer.step()
    return tracker.steps[0]


def test_choices_that_no_expert_takes_are_dropped():
    class CapacityRouter(nn.Module):
        """Sends every token to the first expert, which takes two."""

        def forward(self, x):
            chosen = torch.full((len(x), 1), 4)
            chosen[:2] = 0
            return x.new_zeros(len(x), 4), torch.ones(len(x), 1), chosen

    values = measured(CapacityRouter())
    found = [values[f"router/router/{name}"] for name in ("dropped", "max_load", "min_load", "entropy")]
    assert found == [0.75, 4, 0, pytest.approx(1.3862944)]


def test_what_can_not_be_counted_is_refused():
    class OddRouter(nn.Identity):
        pass

    with pytest.raises(ConfigError, match=r"The router 'router' \(`OddRouter`\) does not return logits, weights"):
        measured(OddRouter())
    with pytest.raises(ConfigError, match="Linear has no routers"):
        measured(nn.Identity())
    with pytest.raises(TypeError, match=r"returned by `Booster\.boost`; got `Identity`"):
        RouterStatistics(Booster("cpu"), nn.Identity())
