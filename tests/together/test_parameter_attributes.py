"""Optimizers that ask for the class or the attributes of a parameter are told those of the script's parameter."""

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise, tokens
from torch import nn

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

SETTINGS = {
    "ddp": Setting(TorchDDPPlugin),
    "zero": Setting(LowLevelZeroPlugin, {"stage": 2}),
    "zero, flat": Setting(LowLevelZeroPlugin, {"partition": "flat"}),
    "gemini": Setting(GeminiPlugin),
    "fsdp": Setting(TorchFSDPPlugin),
    "fsdp, flat": Setting(TorchFSDPPlugin, {"partition": "flat"}),
    "tp": Setting(HybridParallelPlugin, {"tp_size": 2}),
    "stage 3": Setting(HybridParallelPlugin, {"tp_size": 1, "zero_stage": 3}),
}


class Slow(nn.Parameter):
    """A parameter whose class says how it is trained, as that of geoopt's manifolds does."""


class Asking(torch.optim.Optimizer):
    """Asks for what scripts for the fastest training of GPT-2 set (``lr_mul``), and for a class."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = getattr(parameter, "lr_mul", 1.0) * (0.1 if isinstance(parameter, Slow) else 1.0)
                    parameter.sub_(parameter.grad, alpha=group["lr"] * factor)


def marked(build):
    model = build()
    for number, module in enumerate(each for each in model.modules() if isinstance(each, nn.Linear)):
        module.weight.lr_mul = 1.0 + number
        if number == 1:
            module.weight = Slow(module.weight.data)
    return model


def asking(model):
    return Asking(model.parameters())


def mark_more(step, model, _optimizer):
    for name, parameter in model.named_parameters():
        if step == 1 and name.endswith("weight"):
            parameter.lr_mul = 3.0


def build_mlp():
    return marked(TinyMLP)


def build_llama():
    return marked(tiny_llama)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_optimizer_is_told_the_class_and_attributes_of_each_parameter(name):
    build, batch = (build_llama, tokens(4, 8)) if name == "tp" else (build_mlp, noise(4, 8))
    case = Case(build=build, batch=batch, optimizer=asking, before_step=mark_more, max_norm=None)
    assert_equals_one_process(case, SETTINGS[name])
