"""``torch.compile`` before and after ``boost``: losses and parameters equal those without, and names are the user's."""

import pytest
import torch
from cases import Setting
from compiler_warnings import ignore_compiler_warnings
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import on_ranks

from booster_core.errors import ConfigError
from booster_gemini import GeminiPlugin
from booster_runtime import compile_layers, enable_activation_checkpointing, full_gradient
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

SETTINGS = {
    **runs("single", "ddp", "fsdp", "zero1", "zero2", "gemini", "zero3"),
    "gemini-alone": Setting(GeminiPlugin, {"min_chunk_bytes": 8192}, 1),
    "hybrid": RUNS["hybrid-tp"],
}
HOW = ["before", "method", "blocks", "wrapped-blocks", "after", "after-method", "checkpointed", "layers"]
WHOLE = "whole layers"


def compile_before(model, how, backend):
    """Compile a plain model in one of the ways there are."""
    if how == "before":
        return torch.compile(model, backend=backend)
    if how == "method":
        model.compile(backend=backend)
    layers = model.model.layers
    if how == "checkpointed":
        enable_activation_checkpointing(model, by="LlamaDecoderLayer")  # one layer alone is not found
    if how in ("blocks", "checkpointed"):
        for layer in layers:
            layer.compile(backend=backend)
    if how == "layers":
        compile_layers(model, by="LlamaDecoderLayer", backend=backend)  # one layer alone is not found
    if how == WHOLE:
        assert compile_layers(model, backend=backend) == ["model.layers.0", "model.layers.1"]
        with pytest.raises(ConfigError, match="or a part of it is compiled already"):
            compile_layers(model)
    if how == "wrapped-blocks":
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, backend=backend)
    return model


def train(run, how, num_layers, checkpoints=False):
    """Return losses, gradients and parameters, names, and how many graphs there were after each step."""
    from torch._dynamo.backends.registry import lookup_backend

    ignore_compiler_warnings()
    # What earlier tests compiled in this process counts towards the compiler's limit, and only some ranks ran them: one
    # that falls back to eager layers sums gradients together, which compiled ones sum one by one.
    torch.compiler.reset()
    torch.manual_seed(0)
    graphs, after, losses, gradients = [], [], [], {}

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    model = tiny_llama(num_hidden_layers=num_layers)
    names = [name for name, _ in model.named_parameters()]
    model = compile_before(model, how, backend)
    if checkpoints:
        enable_activation_checkpointing(model)
    booster = SETTINGS[run].make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    if how == "after":
        model = torch.compile(model, backend=backend)
    elif how == "after-method":
        model.compile(backend=backend)
    elif how == WHOLE:
        with pytest.raises(ConfigError, match="before it is boosted"):
            compile_layers(model)
    # Twice is enough for a layer; else the compiler would leave out the later layers of a long model.
    limits = {"recompile_limit": 8 if checkpoints else 2, "fail_on_recompile_limit_hit": True} if how == WHOLE else {}
    index, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    with torch._dynamo.config.patch(**limits):
        for step in range(3):
            tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))[index::size]
            loss = model(input_ids=tokens, labels=tokens).loss
            booster.backward(loss, optimizer)
            if step == 0:
                gradients = {f"gradient of {name}": full_gradient(booster, model, name) for name in names}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            after.append(len(graphs))
    return losses, gradients | whole_model(booster, model), list(model.state_dict()), after


def compare(run, how, num_layers, checkpoints=False):
    """Compare with eager training; return names, the numbers of graphs, and names without compilation."""
    expected_losses, expected, plain_names, _ = train(run, None, num_layers, checkpoints)
    losses, tensors, names, after = train(run, how, num_layers, checkpoints)
    assert losses == pytest.approx(expected_losses, rel=tolerance_for(torch.float32).relative)
    assert_same_tensors(tensors, expected, tolerance_for(torch.float32))
    return names, after, plain_names


BROKEN = {"gemini", "zero3"}
"""Where a block that is recomputed gathers the parameters of its modules one by one."""


@matrix(1, run=SETTINGS, checkpoints=[False, True])
@on_ranks(lambda run: SETTINGS[run].num_ranks, timeout_seconds=120)
def test_layers_are_compiled_whole(run, checkpoints):
    """One graph, which both layers share, the numbers of eager training, and the names of the user's model."""
    names, after, plain_names = compare(run, WHOLE, 2, checkpoints)
    assert names == plain_names
    if run == "hybrid":  # each layer has its own, and again without the hooks of the first step
        assert 2 <= after[0] <= after[1] == after[2] <= 4
    elif checkpoints and run in BROKEN:
        assert after[0] == after[1] == after[2]
    else:
        assert after == [1, 1, 1]


# DDP has test_ddp_compile.py, experts test_expert_compile.py.
@matrix(["hybrid-checkpointed", "fsdp-before", "gemini-before"], run=SETTINGS, how=HOW)
@on_ranks(lambda run: SETTINGS[run].num_ranks, timeout_seconds=120)
def test_traced_training_equals_eager(run, how):
    # Gemini's hooks split the graph, so that each layer takes many times as long as under the others.
    names, _, plain_names = compare(run, how, 1 if run.startswith("gemini") else 2)
    if how in ("before", "method", "blocks", "after-method", "layers"):
        assert names == plain_names
