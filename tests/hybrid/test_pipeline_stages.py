"""Unmodified models, cut into stages that run on several ranks, give the loss and the gradients of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from model_zoo import get_model

from booster_core.errors import ConfigError
from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.cut import share_layers
from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stages import StagePlan, find_cuts
from booster_hybrid.policy.find import policy_for
from booster_testing import run_on_ranks

MODELS = (
    "llama",
    "llama_tied",
    "mistral",
    "mixtral",
    "qwen2",
    "gemma",
    "phi",
    "deepseek_v3",
    "cohere",
    "glm",
    "gpt2_lm",
    "gptj",
    "opt",
    "bert_masked_lm",
    "t5_generation",
    "vit_classification",
    "whisper_generation",
)


def staged(model, batch, config, rank):
    """Return the model cut into this rank's stages, and the names of all that stages send."""
    cuts = find_cuts(model, policy_for(model).layers, batch, config, trains=True)
    stages = StagePlan.of(model, cuts, config).cut(model, rank, lambda parameter: parameter.dtype)
    return stages, cuts.sent_names


def summed_gradients(model):
    """Return every parameter's gradient, summed over the stages that hold it."""
    gathered: list = [None] * dist.get_world_size()
    mine = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    dist.all_gather_object(gathered, mine)
    total: dict[str, torch.Tensor] = {}
    for of_rank in gathered:
        for key, gradient in of_rank.items():
            total[key] = total[key] + gradient if key in total else gradient
    return total


def compare(name, style, num_chunks, num_microbatches):
    rank, size = dist.get_rank(), dist.get_world_size()
    zoo = get_model(name)
    whole = zoo.seeded()
    model = copy.deepcopy(whole)
    parts = [zoo.share(0, index, 1 + index % 2) for index in range(num_microbatches)]  # of different sizes
    samples = [1 + index % 2 for index in range(num_microbatches)]
    weights = [count / sum(samples) for count in samples]
    schedule = make_schedule(style, size, num_microbatches, num_chunks)
    config = PipelineConfig(size=size, style=style, num_model_chunks=num_chunks if style == "interleaved" else None)
    stages, names = staged(model, parts[0], config, rank)
    link = P2PChannel(names, range(size), rank, make_channels([range(size)]), torch.device("cpu"))
    fired: dict[str, int] = {}
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: fired.__setitem__(key, fired.get(key, 0) + 1))

    def backward(tensors, gradients, is_last):
        del is_last
        torch.autograd.backward(tensors, gradients)

    def criterion(outputs, batch):
        return zoo.loss(outputs, batch)

    run = PipelineRun(stages, schedule, rank, link, parts, weights, criterion, backward)
    run.run()
    assert run.error is None, run.error
    evaluation = PipelineRun(stages, schedule, rank, link, parts, weights, criterion, None, keeps_outputs=True)
    evaluation.run()

    expected = 0.0
    for part, weight in zip(parts, weights, strict=True):
        loss = zoo.loss_of(whole, part) * weight
        loss.backward()
        expected += loss.item()
    total = summed_gradients(model)
    for key, parameter in whole.named_parameters():
        if parameter.grad is not None:
            # A parameter of several stages is summed in another order.
            torch.testing.assert_close(total[key], parameter.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    # Once for each microbatch, in each of the rank's stages that uses the parameter.
    assert all(count % num_microbatches == 0 for count in fired.values())
    for each in (run, evaluation):
        if each.losses:
            assert float(sum(each.losses.values())) == pytest.approx(expected, rel=1e-6)
    held = sum(parameter.numel() for parameter in model.parameters())
    return held / sum(parameter.numel() for parameter in whole.parameters()), bool(run.losses)


@matrix(["mistral"], name=MODELS)
def test_two_stages_train_as_one_process(name):
    shares = run_on_ranks(compare, 2, f"transformers/{name}", "1f1b", 1, 3)
    assert [has_loss for _, has_loss in shares] == [False, True]
    if not name.endswith("tied"):
        assert max(share for share, _ in shares) < 1.0


@pytest.mark.parametrize(
    ("name", "style", "num_chunks", "num_ranks"),
    [
        pytest.param("t5_generation", "gpipe", 1, 4, marks=pytest.mark.slow),
        pytest.param("t5_generation", "interleaved", 2, 2, marks=pytest.mark.slow),
        pytest.param("whisper_generation", "1f1b", 1, 4, marks=pytest.mark.slow),
        ("whisper_generation", "interleaved", 2, 2),
    ],
)
def test_encoders_and_decoders_are_cut_anywhere(name, style, num_chunks, num_ranks):
    run_on_ranks(compare, num_ranks, f"transformers/{name}", style, num_chunks, 5)


def test_layers_are_shared_out_and_the_ends_have_no_more_than_the_middle():
    counts = [stage.last - stage.first for stage in share_layers(10, 4)]
    assert sum(counts) == 10
    assert counts[0] <= min(counts[1:3])
    assert [stage.last - stage.first for stage in share_layers(5, 2, [2, 3])] == [2, 3]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "asked", "message"),
    [
        (2, 3, None, "2 layers can't fill 3 stages"),
        (6, 2, [3, 4], r"num_layers_per_stage=\[3, 4\]` must list 2 positive numbers that add up to the model's 6"),
        (6, 2, [6, 0], "positive numbers"),
    ],
)
def test_layers_that_do_not_divide_are_refused(num_layers, num_stages, asked, message):
    with pytest.raises(ConfigError, match=message):
        share_layers(num_layers, num_stages, asked)


def test_a_layer_that_is_called_twice_cannot_be_cut():
    class Repeated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

        def forward(self, x):
            return self.layers[0](self.layers[0](x))

    with pytest.raises(ConfigError, match=r"Layer 'layers\.0' is called 2 times"):
        find_cuts(Repeated(), ["layers"], {"x": torch.ones(1, 2)}, PipelineConfig(size=2), trains=True)


def test_a_model_without_the_lists_of_its_policy_is_refused():
    with pytest.raises(ConfigError, match="'blocks', of which the model has none"):
        find_cuts(torch.nn.Linear(2, 2), ["blocks"], {"input": torch.ones(1, 2)}, PipelineConfig(size=2), trains=True)
