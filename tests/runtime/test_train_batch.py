"""`train_batch` and `evaluate_batch` equal plain PyTorch on one large batch, and refuse what they can't weigh."""

import weakref

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin
from torch import nn
from whole_batches import SAMPLES, assert_equals_one_large_batch, batches_of, count_labels, cross_entropy

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import evaluate_batch, train_batch
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP
from booster_testing.training import whole_model

LEARNING_RATE = 0.1


class Predictor(nn.Module):
    """Predicts a token from each position."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 16))

    def forward(self, input_ids, labels=None):
        del labels  # a microbatch has them
        return self.layers(input_ids)


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Predictor()


def boosted(model, plugin=None):
    booster = Booster(plugin=plugin)
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))[:2]


@pytest.mark.parametrize("plugin_class", [ReferencePlugin, ReferencePipelinePlugin])
def test_gradients_and_losses_are_those_of_one_large_batch(plugin_class):
    assert_equals_one_large_batch(plugin_class(), 2, replicas=2, build=make_model)


def ranks_of(plugin_class):
    return 1 if plugin_class is None else 2


def mean_square(outputs, _):
    return outputs.square().mean()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("plugin_class", [None, ReferencePlugin, ReferencePipelinePlugin])
@on_ranks(ranks_of)
def test_an_evaluation_restores_the_mode_of_each_module(plugin_class, is_training):
    class FrozenNorm(nn.Sequential):
        """Two norms, one of which stays in `eval()`, as models with a frozen backbone override `train`."""

        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self

    norms = FrozenNorm(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    inner = nn.Sequential(nn.BatchNorm1d(8), norms, nn.Sequential(nn.Dropout(), nn.Linear(8, 4)))
    booster, model, optimizer = boosted(inner, plugin_class and plugin_class())
    model.train(is_training)
    inner[0].eval()
    inner[2][1].train(not is_training)
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2, "some modules train and some do not"
    batch = {"input": torch.arange(32.0).reshape(4, 8)}
    evaluate_batch(booster, iter([batch]), model, mean_square)
    assert {name: module.training for name, module in model.named_modules()} == before
    train_batch(booster, iter([batch]), model, mean_square, optimizer)
    assert not inner[0].running_mean.any(), "a norm in `eval()` keeps its statistics"


def test_an_evaluation_that_fails_restores_modes():
    class FailsToEvaluate(TinyMLP):
        def forward(self, x):
            if not self.training:
                msg = "no evaluation"
                raise RuntimeError(msg)
            return super().forward(x)

    inner = FailsToEvaluate()
    frozen = next(iter(inner.children()))
    booster, model, _ = boosted(inner)
    frozen.eval()
    with pytest.raises(RuntimeError, match="no evaluation"):
        evaluate_batch(booster, iter([torch.ones(2, 8)]), model, lambda outputs, batch: outputs.mean())
    assert inner.training
    assert not frozen.training


def count_as_tensor(batch):
    return torch.tensor(3 if batch["input"].sum() > 0 else 7) * len(batch["input"])


class LossOnOneRank(ReferencePipelinePlugin):
    """Returns no loss on rank 0, as on a pipeline's first stage."""

    def execute_pipeline(self, *args, **kwargs):
        result = super().execute_pipeline(*args, **kwargs)
        return {**result, "loss": None} if torch.distributed.get_rank() == 0 else result


@pytest.mark.parametrize("weight", [None, count_as_tensor])
@pytest.mark.parametrize("plugin_class", [None, ReferencePlugin, ReferencePipelinePlugin, LossOnOneRank])
@on_ranks(ranks_of)
def test_a_double_loss_stays_double(plugin_class, weight):
    """Compare losses in training and evaluation, and the update of the weight by the gradient."""
    torch.manual_seed(2)
    inner, plain = (nn.Linear(8, 1, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(inner.state_dict())
    booster = Booster(plugin=plugin_class and plugin_class())
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    batches = [{"input": torch.full((2, 8), number, dtype=torch.float64)} for number in (1 / 3, -1 / 7)]
    found = [evaluate_batch(booster, iter([batch]), model, mean_square, weight=weight).loss for batch in batches]
    found.append(train_batch(booster, iter(batches), model, mean_square, optimizer, accumulation=2, weight=weight))
    expected = [plain(batch["input"]).square().mean() for batch in batches]
    shares = (0.5, 0.5) if weight is None else (0.3, 0.7)
    expected.append(sum(share * each for share, each in zip(shares, expected, strict=True)))
    expected[-1].backward()
    for loss, each in zip(found, expected, strict=True):
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, each.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(plain.weight - inner.weight, plain.weight.grad, rtol=1e-12, atol=0)


def train_on_pairs(plugin, criterion):
    torch.manual_seed(2)
    booster, model, optimizer = boosted(TinyMLP(), plugin)
    pairs = [(torch.full((2, 8), float(number)), torch.ones(2, 4)) for number in range(3)]
    batches = iter(pairs)
    losses = [train_batch(booster, batches, model, criterion, optimizer, accumulation=2) for _ in range(2)]
    assert next(batches, None) is None
    return losses, whole_model(booster, model)


def squared_error(outputs, batch):
    return torch.nn.functional.mse_loss(outputs, batch[1])


def test_pairs_of_inputs_and_targets_and_an_odd_last_batch():
    torch.manual_seed(2)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    expected = []
    for numbers in ((0, 1), (2,)):
        each = [
            torch.nn.functional.mse_loss(model(torch.full((2, 8), float(number))), torch.ones(2, 4))
            for number in numbers
        ]
        loss = sum(each) / len(each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    for plugin, size in ((None, 1), (ReferencePlugin(), 2)):  # the ranks train on the same batches
        for losses, parameters in run_on_ranks(train_on_pairs, size, plugin, squared_error):
            torch.testing.assert_close(losses, expected)
            torch.testing.assert_close(parameters, {key: p.detach() for key, p in model.named_parameters()})


def test_targets_that_could_be_an_argument_raise():
    class Masked(TinyMLP):
        def forward(self, x, mask=None):
            return super().forward(x if mask is None else x * mask)

    booster, model, optimizer = boosted(Masked())
    with pytest.raises(ConfigError, match=r"requires 1: the others may be for `mask` or for the criterion"):
        train_batch(booster, iter([(torch.ones(2, 8), torch.ones(2, 4))]), model, squared_error, optimizer)


def test_outputs_are_gone_before_backward():
    were_alive = []

    class WatchesBackward(TinyMLP):
        def forward(self, x):
            hidden = super().forward(x)
            outputs = {"hidden": hidden * 2, "loss": hidden.square().mean()}
            reference = weakref.ref(outputs["hidden"])
            hidden.register_hook(lambda gradient: were_alive.append(reference() is not None))
            return outputs

    booster, model, optimizer = boosted(WatchesBackward())
    train_batch(booster, iter([{"x": torch.ones(4, 8)}]), model, None, optimizer)
    assert were_alive == [False]


def test_outputs_without_a_loss_raise():
    booster, model, optimizer = boosted(TinyMLP())
    with pytest.raises(ConfigError, match=r"outputs \(`Tensor`\) have no loss. Pass a criterion"):
        train_batch(booster, iter([torch.ones(2, 8)]), model, None, optimizer)


@raises_on_ranks(ConfigError, r"weights of the batches sum up to 0 over all ranks", 2)
def test_a_step_without_weight_raises_on_every_rank():
    booster, model, optimizer = boosted(make_model(), ReferencePlugin())
    batch = {**batches_of(0)[0], "labels": torch.full((SAMPLES, 6), -100)}
    train_batch(booster, iter([batch]), model, cross_entropy, optimizer, weight=count_labels)


@pytest.mark.parametrize("call", [train_batch, evaluate_batch])
def test_a_loader_in_place_of_its_iterator_raises(call):
    booster, model, optimizer = boosted(TinyMLP())
    arguments = [optimizer] if call is train_batch else []
    with pytest.raises(TypeError, match=rf"`{call.__name__}` takes an iterator .*`iter\(dataloader\)`.*got `list`"):
        call(booster, [torch.ones(2, 8)], model, squared_error, *arguments)


@pytest.mark.parametrize("accumulation", [0, -1, True, 1.5])
def test_a_wrong_number_of_batches_raises(accumulation):
    booster, model, optimizer = boosted(TinyMLP())
    with pytest.raises(ConfigError, match=f"`accumulation={accumulation}` is no number of batches"):
        train_batch(booster, iter([torch.ones(2, 8)]), model, squared_error, optimizer, accumulation=accumulation)
