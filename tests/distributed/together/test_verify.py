"""`verify` passes for every plugin, and finds what a broken one gets wrong, by name."""

import pytest
import torch
from torch import nn

from booster_core import verify
from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import unwrap_model
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero2": (LowLevelZeroPlugin, {"stage": 2}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}),
    "hybrid-pp": (HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}),
}


def build():
    model = tiny_llama()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(samples=4):
    tokens = torch.randint(16, (samples, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def verify_plugin(name, precision):
    plugin_class, options = PLUGINS[name]
    before = torch.get_rng_state()
    report = verify(build, plugin_class(**options), batch(), mixed_precision=precision)
    assert torch.equal(torch.get_rng_state(), before)
    report.check()
    return [(found.what, found.step, found.name) for found in report.differences]


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_trains_as_one_process(name):
    first, second = run_on_ranks(verify_plugin, 2, name, None)
    assert first == second
    kinds = {what for what, _, _ in first}
    assert kinds == {"initial parameter", "output", "evaluation loss", "loss", "gradient", "update"}
    names = {name for name, _ in tiny_llama().named_parameters()}
    assert {name for what, step, name in first if (what, step) == ("gradient", 2)} == names


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_bf16_is_compared_with_bf16(name):
    run_on_ranks(verify_plugin, 2, name, "bf16")


class ScalesOneGradient(TorchDDPPlugin):
    """Gets one parameter's gradient wrong by a tenth."""

    api_version = 1

    def configure(self, objects, context):
        boosted = super().configure(objects, context)
        dict(unwrap_model(boosted.model).named_parameters())["model.layers.1.mlp.up_proj.weight"].register_hook(
            lambda gradient: gradient * 1.1
        )
        return boosted


class IgnoresWeightDecay(TorchDDPPlugin):
    """Steps without weight decay."""

    api_version = 1

    def configure(self, objects, context):
        boosted = super().configure(objects, context)
        for group in boosted.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return boosted


class StartsElsewhere(TorchDDPPlugin):
    """Ranks start from other values than the user's model has."""

    api_version = 1

    def configure(self, objects, context):
        with torch.no_grad():
            objects.model.lm_head.weight.add_(0.01)
        return super().configure(objects, context)


class ComputesInEvaluation(TorchDDPPlugin):
    """Leaves the model in training mode when it is evaluated."""

    api_version = 1

    def configure(self, objects, context):
        objects.model.lm_head.register_forward_hook(lambda module, _, out: out if module.training else 1.01 * out)
        return super().configure(objects, context)


def build_with_decay():
    model = tiny_llama()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)


def found_by(plugin_class, make=build):
    report = verify(make, plugin_class(), batch())
    with pytest.raises(GradientError, match="differs from one process"):
        report.check()
    return [(found.what, found.name) for found in report.unexplained]


@pytest.mark.parametrize(
    ("plugin_class", "first", "make"),
    [
        (ScalesOneGradient, ("gradient", "model.layers.1.mlp.up_proj.weight"), build),
        (IgnoresWeightDecay, ("loss", None), build_with_decay),
        (StartsElsewhere, ("initial parameter", "lm_head.weight"), build),
        (ComputesInEvaluation, ("output", None), build),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_plugin_is_found_and_its_first_fault_is_named(plugin_class, first, make):
    of_one, of_other = run_on_ranks(found_by, 2, plugin_class, make)
    assert of_one == of_other
    what, name = of_one[0]
    assert what == first[0]
    if first[1] is not None:
        assert name == first[1]


def dropping():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda outputs, batch: outputs.square().mean()


def rates_after_verify():
    made = []

    def build_one():
        made.append(dropping())
        return made[-1]

    verify(build_one, "ddp", torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).check()
    return [model[1].p for model, *_ in made]


def test_dropout_is_off_while_it_compares_only():
    assert run_on_ranks(rates_after_verify, 2) == [[0.5, 0.5]] * 2


def unseeded():
    model = TinyMLP()
    with torch.no_grad():
        next(model.parameters()).add_(torch.rand((), generator=torch.Generator().manual_seed(unseeded.calls)))
    unseeded.calls += 1
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda outputs, batch: outputs.mean()


unseeded.calls = 0


def no_loss():
    model = TinyMLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def no_optimizer():
    return TinyMLP(), None


REFUSED = {
    "unseeded": (unseeded, torch.zeros(4, 8), "`build` makes other weights each time"),
    "uneven": (build, batch(3), "A batch of 3 samples can't be shared evenly by 2"),
    "no-samples": (build, {"input_ids": torch.tensor(1)}, "A batch of no samples"),
    "not-a-tuple": (TinyMLP, torch.zeros(4, 8), "`build` returns .*; got `TinyMLP`"),
    "no-optimizer": (no_optimizer, torch.zeros(4, 8), "`build` returns .*; got `TinyMLP, NoneType`"),
    "no-loss": (no_loss, torch.zeros(4, 8), "have no loss"),
}


def refused(case):
    make, data, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        verify(make, "ddp", data)
    return True


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_compared_raises_on_every_rank(case):
    assert run_on_ranks(refused, 2, case) == [True, True]
