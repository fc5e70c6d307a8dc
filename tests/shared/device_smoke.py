"""Train a small language model under a plugin on devices, and compare with one process on one device.

The functions name no kind of device: `device_runs` runs them on CUDA, and tests/together/devices on the
simulated accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core import Booster
from booster_core.ranks import DistCoordinator
from booster_testing.compare import ADAPTIVE, DTYPES, assert_same_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping


STEPS = 5
SAMPLES = 8
_LENGTH = 12
_VOCABULARY = 64
PLUGINS = {
    "ddp": "booster_ddp:TorchDDPPlugin",
    "fsdp": "booster_fsdp:TorchFSDPPlugin",
    "zero": "booster_zero:LowLevelZeroPlugin",
    "gemini": "booster_gemini:GeminiPlugin",
    "hybrid": "booster_hybrid:HybridParallelPlugin",
}


@dataclass(frozen=True)
class Case:
    """A plugin with its options, and the number of devices that it needs."""

    plugin: str
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 2

    @property
    def has_pipeline(self):
        """Whether the model is cut into pipeline stages."""
        return self.options.get("pp_size", 1) > 1

    def make_booster(self, device, precision="fp32", **more):
        """Return a new Booster with the plugin, also with more options."""
        return Booster(device, precision, make_plugin(self.plugin, {**self.options, **more}))


CASES = {
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "fsdp, offload": Case("fsdp", {"cpu_offload": True}),
    "zero 1": Case("zero", {"stage": 1}),
    "zero 2": Case("zero", {"stage": 2}),
    "zero 2, offload": Case("zero", {"stage": 2, "offload": "cpu"}),
    "gemini": Case("gemini"),
    "gemini, offload": Case("gemini", {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "gemini, auto": Case(
        "gemini", {"placement_policy": "auto", "memory_budget_bytes": 300_000, "min_chunk_bytes": 4096}
    ),
    "tensor parallel": Case("hybrid", {"tp_size": 2}),
    "sequence parallel": Case("hybrid", {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "pipeline": Case("hybrid", {"pp_size": 2, "num_microbatches": 4}),
    "interleaved pipeline": Case(
        "hybrid", {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}
    ),
    "zero-bubble pipeline": Case("hybrid", {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv"}),
    "pipeline of four stages": Case("hybrid", {"pp_size": 4, "num_microbatches": 8}, world_size=4),
    "tensor parallel, pipeline": Case("hybrid", {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}, world_size=4),
    "pipeline, zero 1": Case("hybrid", {"pp_size": 2, "num_microbatches": 4, "zero_stage": 1}, world_size=4),
}


def make_plugin(name, options):
    """Return a plugin by its name in `PLUGINS`."""
    module, attribute = PLUGINS[name].split(":")
    return getattr(import_module(module), attribute)(**options)


def make_model():
    """Return a small Llama, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=_VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config)


def make_deep_model(seed):
    """Return a Llama with tied embeddings and a frozen layer, of 3 MiB, none of whose tensors is large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 24, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=_VOCABULARY, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.model.layers[0].requires_grad_(requires_grad=False)
    model.register_buffer("scale", torch.full((3,), float(seed)))
    return model


def part_of(whole, shard):
    """Return what a shard holds of a whole tensor."""
    part = whole[tuple(slice(*bounds) for bounds in shard.box)]
    return part if shard.flat is None else part.flatten()[slice(*shard.flat)]


def make_optimizer(model):
    """Return an optimizer whose epsilon exceeds rounding errors of gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def batch_of(step):
    """Return the whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(_VOCABULARY, (SAMPLES, _LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train_plainly(device):
    """Return the losses and the trained parameters of one process, on its device."""
    model = make_model().to(device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        loss = model(**{name: tensor.to(device) for name, tensor in batch_of(step).items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def backward(case, booster, model, optimizer, number):
    """Run this rank's part of a batch forward and backward; return the loss where it is known."""
    index, size = booster.plugin.data_parallel_coordinates(DistCoordinator())
    batch = {name: tensor[index::size] for name, tensor in batch_of(number).items()}
    if case.has_pipeline:
        stream, loss_of = iter([batch]), lambda output, _: output.loss
        return booster.execute_pipeline(stream, model, loss_of, optimizer, return_loss=True)["loss"]
    loss = model(**{name: tensor.to(booster.device) for name, tensor in batch.items()}).loss
    booster.backward(loss, optimizer)
    return loss


class Run:
    """A model boosted under a case's plugin.

    Args:
        case: Plugin and options.
        device: Device type.
        precision: As for ``Booster``.
    """

    def __init__(self, case, device, precision):
        self.case = case
        example = {"example_batch": batch_of(0)} if case.has_pipeline else {}
        self.booster = case.make_booster(device, precision, **example)
        model = make_model()
        self.model, self.optimizer, *_ = self.booster.boost(model, make_optimizer(model))

    def step(self, number):
        """Train a step and return the loss of the whole batch, on the ranks that know it."""
        loss = backward(self.case, self.booster, self.model, self.optimizer, number)
        self.optimizer.clip_grad_by_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.zeros(2)
        if loss is not None:
            total += torch.tensor([float(loss.detach()), 1.0])
        torch.distributed.all_reduce(total)
        return float(total[0] / total[1])


def train(case, device, precision, folder):
    """Train, compare with one process, save, load into a new run, and compare its next step.

    Collective: every rank.
    """
    run = Run(case, device, precision)
    losses = [run.step(number) for number in range(STEPS)]
    model_folder, optimizer_folder = str(Path(folder) / "model"), str(Path(folder) / "optimizer")
    run.booster.save_model(run.model, model_folder, shard=True)
    run.booster.save_optimizer(run.optimizer, optimizer_folder, shard=True)
    expected, parameters = train_plainly(device)
    # A mean over tokens: a few roundings of the logits remain, in the dtype in which the model computes.
    relative = 8 * torch.finfo(DTYPES[precision]).eps
    assert all(abs(a - b) <= relative * abs(b) for a, b in zip(losses, expected, strict=True)), (losses, expected)
    if precision == "fp32":
        assert_same_parameters(model_folder, parameters)
    other = Run(case, device, precision)
    other.booster.load_model(other.model, model_folder)
    other.booster.load_optimizer(other.optimizer, optimizer_folder)
    assert other.step(STEPS) == run.step(STEPS), "a loaded run goes on as the one that was saved"


def assert_same_parameters(folder, expected):
    """Compare the parameters that transformers loads from a saved model with those of one process, by name."""
    from transformers import LlamaForCausalLM

    found = {name: each.detach() for name, each in LlamaForCausalLM.from_pretrained(folder).named_parameters()}
    assert found.keys() == expected.keys()
    assert_same_tensors(found, expected, ADAPTIVE)
