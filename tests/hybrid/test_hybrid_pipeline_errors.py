"""What goes wrong in a pipeline is raised on every rank, and nobody waits for a rank that has failed."""

import time
import warnings

import pytest
import torch
from forked_scripts import torchrun_variables
from hybrid_runs import boosted
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks, raises_on_ranks

from booster_core import Booster
from booster_core.errors import AbsentValueError, ConfigError, GradientError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import full_gradient
from booster_testing.models import tiny_llama


def llama():
    torch.manual_seed(3)
    return tiny_llama(num_hidden_layers=4)


def batch():
    return get_model("transformers/llama").share(0, 0, 4)


def own_loss(outputs, _):
    return outputs.loss


def nothing(outputs, _):
    del outputs


def detached(outputs, _):
    return outputs.loss.detach()


def broken(outputs, _):
    raise KeyError(outputs.loss.dim())


def ended(outputs, _):
    next(each for each in outputs if each is None)


@matrix(
    [
        "ended-ConfigError-`ended` .* took the next of what had ended-1f1b",
        "nothing-ConfigError-must return a scalar tensor; it returned `NoneType`-zbv",
    ],
    **{
        "criterion, kind, message": [
            (ended, ConfigError, "`ended` .* took the next of what had ended"),
            (nothing, ConfigError, "must return a scalar tensor; it returned `NoneType`"),
            (detached, GradientError, "The loss has no gradient"),
            (broken, KeyError, "0"),
        ]
    },
    options=named([{}, {"zero_stage": 2}, {"zero_stage": 3}, {"pp_style": "zbv"}], ["1f1b", "zero2", "zero3", "zbv"]),
)
@on_ranks(4)
def test_an_error_in_the_criterion_raises_on_every_rank(criterion, kind, message, options):
    booster, model, optimizer = boosted(llama(), pp_size=2, **options)
    with pytest.raises(kind, match=message):
        booster.execute_pipeline(iter([batch()]), model, criterion, optimizer)


@raises_on_ranks(ConfigError, r"`full_gradient`.*take the names from the model before `boost`", 2)
def test_ranks_that_ask_for_gradients_of_their_own_stages_raise():
    booster, model, _ = boosted(llama(), pp_size=2)
    for name, _ in model.unwrap().named_parameters():
        full_gradient(booster, model, name)


ONE_FAILS = """
import pathlib, sys, time
import torch
from booster_core import Booster, launch_from_torch
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import tiny_llama

failing, style = int(sys.argv[1]), sys.argv[2]
rank = launch_from_torch(timeout_seconds=1200.0).rank
model = tiny_llama(num_hidden_layers=4)
booster = Booster(plugin=HybridParallelPlugin(pp_size=2, tp_size=2, pp_style=style))
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fail(module, args):
    if rank == failing and step == 1:
        pathlib.Path(sys.argv[3]).write_text(str(time.time()))
        raise torch.OutOfMemoryError("no memory")


for layer in model.unwrap().model.layers:
    layer.mlp.register_forward_pre_hook(fail)
tokens = torch.ones(4, 8, dtype=torch.long)
batch = {"input_ids": tokens, "labels": tokens}
for step in range(3):
    booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    print(f"rank {rank} has done step {step}", flush=True)
"""


@matrix(1, failing=[1, 2], style=["1f1b", "zbv"])
def test_all_ranks_end_when_one_of_a_stage_fails(failing, style, scripts, tmp_path):
    (tmp_path / "fails.py").write_text(ONE_FAILS)
    run = scripts.run(tmp_path / "fails.py", [[failing, style, tmp_path / "failed"]] * 4, torchrun_variables(4))
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert all(run.codes), run.output
    assert "step 1" not in run.output
    assert f"rank {failing} failed: OutOfMemoryError: no memory" in run.output
    assert seconds < 120, "they would wait for the time limit of 1,200 s"


@raises_on_ranks(
    ConfigError, r"can't send argument 'input' of layer 'layers\.1': it is of torch\.float32 and has 10 dimensions", 2
)
def test_activations_that_cannot_be_sent_are_named_on_every_rank():
    class Deep(torch.nn.Module):
        """Passes on a tensor of more dimensions than are sent."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x):
            x = self.layers[0](x.view(-1, *[1] * 8, 4))
            return self.layers[1](x).flatten(1)

    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": torch.ones(2, 4)}
    booster, model, optimizer = boosted(Deep(), pp_size=2, **example)
    booster.execute_pipeline(iter([torch.ones(4, 4)]), model, lambda outputs, _: outputs.mean(), optimizer)


@pytest.mark.parametrize("way", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@raises_on_ranks((ConfigError, AbsentValueError), "execute_pipeline", 2)
def test_calling_the_model_or_backward_is_refused_in_a_pipeline(way):
    booster, model, optimizer = boosted(llama(), pp_size=2)
    if way == "forward":
        model(**batch())
    booster.backward(next(model.parameters()).sum(), optimizer)


@on_ranks(2)
def test_fewer_microbatches_than_stages_train_with_a_warning():
    booster, model, optimizer = boosted(llama(), pp_size=2, num_microbatches=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            booster.execute_pipeline(iter([batch()]), model, own_loss, optimizer)
    assert len(seen) == (torch.distributed.get_rank() == 0)
    for each in seen:
        text = "1 microbatch(es) leave each of the 2 ranks of the pipeline idle for 50% of a step."
        assert str(each.message).startswith(text)


@on_ranks(2)
def test_a_pipeline_without_an_optimizer_evaluates_and_does_not_train():
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2))
    model = booster.boost(llama()).model
    loss = booster.execute_pipeline(iter([batch()]), model, own_loss)["loss"]
    if loss is not None:  # the stages evaluate
        assert torch.isclose(loss, llama()(**batch()).loss)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"needs the optimizer returned by `Booster\.boost`; got `AdamW`"):
        booster.execute_pipeline(iter([batch()]), model, own_loss, optimizer)
    local = [parameter for parameter in model.unwrap().parameters() if parameter.numel()]
    with pytest.raises(GradientError, match="the model was boosted without an optimizer"):
        local[0].square().sum().backward()


@on_ranks(2)
def test_parameters_of_other_stages_are_found_by_name_and_raise_where_they_are_read():
    _, model, _ = boosted(llama(), pp_size=2)
    rank = torch.distributed.get_rank()
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    assert model.get_parameter(names[rank]).norm() > 0
    other = model.get_parameter(names[1 - rank])
    assert other.shape == (64, 32)
    with pytest.raises(
        AbsentValueError, match=r"values of parameter '.*', which another .*`booster_runtime\.gathered`"
    ):
        other.norm()
