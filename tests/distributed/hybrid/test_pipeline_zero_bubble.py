"""The zero-bubble V trains unmodified models as one process does, its backward split or not."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from model_zoo import get_model

from booster_core.activation_checkpointing import enable_activation_checkpointing
from booster_core.testing import run_on_ranks
from booster_hybrid.pipeline.cut import StagedModel, share_layers
from booster_hybrid.pipeline.p2p import Link
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.trace import trace_layers
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.registry import policy_for


def deepened(zoo, num_layers):
    """Return a model of the zoo with more layers."""
    model = zoo.seeded()
    config = model.config
    if not hasattr(config, "encoder_layers") and not hasattr(config, "num_decoder_layers"):
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[0]] * num_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model = type(model)(config).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


def losses_of(run):
    return {microbatch: loss.item() for microbatch, loss in run.losses.items()}


def train(zoo, model, parts, *, is_split, is_checkpointed):
    """Run one batch through the V; return how often each gradient was accumulated, and the run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule("zbv", size, len(parts), 2)
    trace = trace_layers(model, policy_for(model).layers, parts[0])
    ranges = share_layers(len(trace.layers), 2 * size)
    split = SplitBackward(model) if is_split else None
    stages = StagedModel(model, trace, [ranges[stage] for stage in schedule.placement.stages_of(rank)])
    if is_checkpointed:
        enable_activation_checkpointing(model)
    names = sorted({each for layer in trace.layers for each in layer.carried})
    link = Link(names, range(size), rank, dist.new_group(), dist.new_group(), torch.device("cpu"))
    fired: dict[str, int] = collections.Counter()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: fired.update([key]))
    calls = []

    def backward(tensors, gradients, is_last):
        calls.append(is_last)
        torch.autograd.backward(tensors, gradients)

    weights = [1 / len(parts)] * len(parts)
    run = PipelineRun(stages, schedule, rank, link, parts, weights, zoo.loss, backward, split=split)
    run.run()
    assert calls.count(True) == 1
    assert calls[-1]
    evaluation = PipelineRun(stages, schedule, rank, link, parts, weights, zoo.loss, None, split=split)
    evaluation.run()
    # Kernels for products without a gradient may round otherwise.
    assert losses_of(evaluation) == pytest.approx(losses_of(run), rel=1e-6)
    assert run.peak_live <= schedule.peak_live(rank)
    assert run.peak_live == schedule.peak_live(rank) or not is_split
    return fired, run


def compare(name, num_microbatches, is_checkpointed):
    zoo = get_model(name)
    whole = deepened(zoo, 4)
    model, unsplit = copy.deepcopy(whole), copy.deepcopy(whole)
    parts = [zoo.share(0, index, num_microbatches) for index in range(num_microbatches)]
    fired, run = train(zoo, model, parts, is_split=True, is_checkpointed=is_checkpointed)
    expected, other = train(zoo, unsplit, parts, is_split=False, is_checkpointed=is_checkpointed)
    assert fired == expected
    assert losses_of(run) == pytest.approx(losses_of(other), rel=1e-6)
    for part in parts:
        (zoo.loss_of(whole, part) / len(parts)).backward()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        gathered, {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    )
    for key, parameter in whole.named_parameters():
        held = [of_rank[key] for of_rank in gathered if key in of_rank]
        if parameter.grad is not None:
            # A parameter of several stages is summed in another order.
            torch.testing.assert_close(sum(held), parameter.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        if key in fired:
            own, of_one = model.get_parameter(key).grad, unsplit.get_parameter(key).grad
            torch.testing.assert_close(own, of_one, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2_lm", "bert_masked_lm", "t5_generation"])
def test_the_v_trains_as_one_process(name):
    run_on_ranks(compare, 2, f"transformers/{name}", 5, False)


def test_the_v_computes_layers_anew():
    run_on_ranks(compare, 2, "transformers/llama", 3, True)
