"""All stages of a pipeline in this process, one after the other: what they compute, without schedules and messages."""

import copy
from collections import defaultdict

import torch

from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.stages import StagePlan, find_cuts
from booster_hybrid.random_streams import MicrobatchStreams, kept_streams, preserve_generators

CPU = torch.device("cpu")


def cut(model, example, *, lists=("layers",), pp_size=2, style="1f1b", trains=True):
    """Return a model's plan, and the model of each rank; the model itself stays whole."""
    config = PipelineConfig(size=pp_size, style=style)
    with preserve_generators():
        cuts = find_cuts(model, list(lists), example, config, trains=trains)
    plan = StagePlan.of(model, cuts, config)
    return plan, [plan.cut(copy.deepcopy(model), rank, lambda each: each.dtype) for rank in range(pp_size)]


def run(plan, staged, batches, criterion, *, seed=7, trains=True):
    """Run microbatches through the stages, and back.

    Returns:
        The outputs and the loss of each microbatch, and the sum of each parameter's gradients over the stages.
    """
    num_stages = len(plan.stages.ranges)
    models = [staged[plan.placement.rank_of(stage)] for stage in range(num_stages)]
    results = []
    with kept_streams(CPU), preserve_generators(), torch.set_grad_enabled(trains):
        for number, batch in enumerate(batches):
            streams = MicrobatchStreams(seed, number, CPU, host=plan.cuts.draws_on_host)
            received, kept, outputs = {}, [], None
            for stage, model in enumerate(models):
                with model.activated(stage, received, streams):
                    outputs, payload = model.run(batch)
                    if stage == num_stages - 1:
                        streams.begin_criterion()
                        with model.showing_absent_state():
                            loss = criterion(outputs, batch)
                kept.append((received, payload))
                received = {
                    name: each.detach().clone().requires_grad_(each.requires_grad) for name, each in payload.items()
                }
            results.append((outputs, loss))
            if trains:
                _go_back(models, kept, loss, streams)
    gradients = defaultdict(int)
    for model in staged:
        for name, parameter in model.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad
    return results, dict(gradients)


def _go_back(models, kept, loss, streams):
    tensors, gradients = [loss], [None]
    for stage in reversed(range(len(models))):
        received = kept[stage][0]
        with models[stage].activated(stage, received, streams):
            if tensors:
                torch.autograd.backward(tensors, gradients)
        arrived = {name: each.grad for name, each in received.items() if each.grad is not None}
        tensors = [kept[stage - 1][1][name] for name in arrived] if stage else []
        gradients = list(arrived.values())
