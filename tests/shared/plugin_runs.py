"""Every plugin as a setting, by the name that tests have for it, and a step of a model that returns its loss."""

import torch
from cases import Setting

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.single import SingleDeviceStrategy
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "single": Setting(SingleDeviceStrategy, num_ranks=1),
    "ddp": Setting(TorchDDPPlugin),
    "fsdp": Setting(TorchFSDPPlugin),
    "zero1": Setting(LowLevelZeroPlugin),
    "zero2": Setting(LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 4096}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 4096}),
    "hybrid-dp": Setting(HybridParallelPlugin, {"zero_stage": 1}),
    "hybrid-tp": Setting(HybridParallelPlugin, {"tp_size": 2}),
    "hybrid-pp": Setting(HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}),
    "zero3": Setting(HybridParallelPlugin, {"zero_stage": 3}),
}


def runs(*names):
    """Return the settings of these names."""
    return {name: RUNS[name] for name in names}


def boosted(setting, model, lr=0.1):
    """Return a new Booster, the boosted model and an optimizer over what is trained: SGD."""
    booster = setting.make_booster()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr)
    return booster, *booster.boost(model, optimizer)[:2]


def backward(booster, model, optimizer, batch):
    """Run a batch forward and backward, through stages if there are some; return the loss where it is known."""
    if getattr(booster.plugin, "pp_size", 1) > 1:
        return booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)["loss"]
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    return loss.detach()


def step(booster, model, optimizer, batch):
    """Take a step on a batch; return the loss where it is known."""
    loss = backward(booster, model, optimizer, batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss
