"""The zero-bubble V trains unmodified models as one process does, its backward split or not."""

from __future__ import annotations

import collections
import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Setting, assert_equals_one_process, zoo_case
from matrix import matrix
from model_zoo import get_model

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.config import PipelineConfig
from booster_hybrid.fixed_draws import preserve_generators
from booster_hybrid.pipeline.cut import StagedModel, share_layers
from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stages import find_cuts
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.find import policy_for
from booster_hybrid.tensor_parallel import linear
from booster_runtime import full_gradient
from booster_runtime.activations import enable_activation_checkpointing
from booster_testing import run_on_ranks


def deepened(name):
    """Return a model of the zoo with four layers."""
    zoo, num_layers = get_model(name), 4
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
    with preserve_generators():
        cuts = find_cuts(model, policy_for(model).layers, parts[0], PipelineConfig(size=size, style="zbv"), trains=True)
    ranges = share_layers(len(cuts.trace.layers), 2 * size)
    split = SplitBackward(model) if is_split else None
    stages = StagedModel(
        model, cuts, [ranges[stage] for stage in schedule.placement.stages_of(rank)], lambda each: each.dtype
    )
    if is_checkpointed:
        enable_activation_checkpointing(model)
    link = P2PChannel(cuts.sent_names, range(size), rank, make_channels([range(size)]), torch.device("cpu"))
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
    assert run.error is None
    assert calls.count(True) == 1
    assert calls[-1]
    evaluation = PipelineRun(stages, schedule, rank, link, parts, weights, zoo.loss, None, split=split)
    evaluation.run()
    # Kernels for products without a gradient may round otherwise.
    assert losses_of(evaluation) == pytest.approx(losses_of(run), rel=1e-6)
    assert run.peak_live <= schedule.peak_live(rank)
    assert run.peak_live == schedule.peak_live(rank) or not is_split
    return fired, run


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)


def boosted(name, options, precision=None):
    zoo = get_model(name)
    plugin = HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2))
    booster = Booster(plugin=plugin, mixed_precision=precision)
    model = deepened(name)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    return booster, model, optimizer


def plugin_of(name, options):
    return HybridParallelPlugin(**options, pp_style="zbv", example_batch=get_model(name).share(0, 0, 2))


def assert_parity(name, num_ranks=4, **options):
    """Train split layers through the V by the plugin, as one process trains them a sample at a time."""
    options = {"pp_size": 2, "tp_size": 2, "num_microbatches": 3, **options}
    count = options["num_microbatches"]
    case = zoo_case(name, samples=count, build=partial(deepened, name), optimizer=adamw, steps=2)
    assert_equals_one_process(case, Setting(partial(plugin_of, name, options), num_ranks=num_ranks), parts=count)


@matrix(["falcon"], name=["llama", "gpt2_lm", "falcon", "t5_generation"])
def test_layers_split_over_ranks_train_as_one_process(name):
    assert_parity(f"transformers/{name}")


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallelism_mode": "split_gather"},
        pytest.param({"zero_stage": 2, "num_ranks": 8}, marks=pytest.mark.slow),  # eight ranks
    ],
)
def test_split_layers_train_with_split_sequences_and_state(options):
    assert_parity("transformers/llama", **options)


def narrow_gradients(name, style):
    zoo = get_model(name)
    options = {"pp_size": 2, "tp_size": 2, "pp_style": style, "num_model_chunks": 2, "num_microbatches": 2}
    booster, model, optimizer = boosted(name, options, "bf16")
    booster.execute_pipeline(iter([zoo.share(0, 0, 4)]), model, zoo.loss, optimizer)
    return {key: full_gradient(booster, model, key) for key in booster.plugin.parameter_paths(model)}


def test_bf16_gradients_of_split_layers_do_not_depend_on_when_they_are_computed():
    """Microbatches reach a weight in their order in either schedule, so that the sums are the same, bit for bit."""
    name = "transformers/llama"
    found, expected = (run_on_ranks(narrow_gradients, 4, name, style)[0] for style in ("zbv", "interleaved"))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


def work_between(name):
    """Return what a rank did, with how many products of matrices that its split layers hold."""
    zoo = get_model(name)
    options = {"pp_size": 2, "tp_size": 2, "pp_style": "zbv", "num_microbatches": 4}
    booster, model, optimizer = boosted(name, options)
    actions, original = [], linear._weight_gradient

    class Noting:
        def begin(self):
            actions.clear()

        @contextlib.contextmanager
        def during(self, action):
            actions.append([action.work.value, 0])
            yield

        def end(self, schedule):
            pass

    def counted(*args, **named):
        actions[-1][1] += 1
        return original(*args, **named)

    model.engine._run_options["record"] = Noting()
    linear._weight_gradient = counted
    try:
        booster.execute_pipeline(iter([zoo.share(0, 0, 4)]), model, zoo.loss, optimizer)
    finally:
        linear._weight_gradient = original
    return actions


def test_split_layers_compute_weight_products_in_the_weight_phase_only():
    for actions in run_on_ranks(work_between, 4, "transformers/llama"):
        at = {work: [count for each, count in actions if each == work] for work, _ in actions}
        # Seven of each layer, a layer in each stage, and the head in the last one.
        assert sorted(set(at["backward_weight"])) in ([7], [7, 8])
        assert not any(at["forward"])
        assert not any(at["backward_input"])
        assert len(at["backward_input"]) == len(at["backward_weight"]) == 8
