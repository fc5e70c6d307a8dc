"""Trainings as values: run plainly in one process, and under a plugin on ranks, and compared tensor by tensor.

A `Case` says what is trained, a `Setting` under what. A whole test is

    assert_equals_one_process(Case(build=Net, batch=noise(4, 8)), Setting(LowLevelZeroPlugin, {"stage": 2}))
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import get_model
from model_zoo.registry import in_double
from torch import nn

from booster_core import Booster
from booster_core.plugin import unwrap_model
from booster_core.state.names import NamedTensors
from booster_runtime import enable_activation_checkpointing, full_gradient
from booster_runtime.data import taken_by, tensors_of
from booster_testing import run_on_ranks
from booster_testing.compare import Tolerance, assert_same_tensors, tolerance_for
from booster_testing.training import Trained, whole_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_core.plugin import Plugin

_CLOSE = tolerance_for(torch.float32)
_NO_EFFECT = 1e-6
"""Rounding error of a gradient that should be zero, relative to the largest gradient: a few times fp32's 2**-24."""


def own_loss(outputs, _batch):
    """Return the loss that a model of transformers computes, or the mean square of what another one returns."""
    return outputs.loss if hasattr(outputs, "loss") else outputs.square().mean()


def itself(outputs, _batch):
    """Return what a model returns that computes its loss."""
    return outputs


def noise(*shape, dtype=torch.float32):
    """Return a function for batches: random numbers of a shape, the same for each number and replica."""
    return partial(_noise, shape, dtype)


def _noise(shape, dtype, number, replica):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(10 * number + replica))


def tokens(*shape):
    """Return a function for batches of a language model with 64 words, as `noise` does."""
    return partial(_tokens, shape)


def _tokens(shape, number, replica):
    ids = torch.randint(64, shape, generator=torch.Generator().manual_seed(10 * number + replica))
    return {"input_ids": ids, "labels": ids}


def recompute(step, model, _optimizer):
    """Let a model recompute its layers from the first step on, as ``before_step`` of a `Case`."""
    if step == 0:
        enable_activation_checkpointing(model)


def in_fp64(build):
    """Return what a function or a class builds, in fp64."""
    return build().double()


def sgd(model):
    """Return an optimizer that shows each gradient in the parameters."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def decayed(model):
    """Return AdamW with groups of two kinds; by its epsilon rounding errors of small gradients stay small."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training that is the same in every process. Its functions are at the top of a module, so that ranks find them.

    Args:
        build: Returns the model; it may use torch's generator.
        batch: Returns the samples of a replica, from the number of the batch and of the replica. The model is called
            with a mapping's entries by name, with a tuple's in their order, or with anything else as it is.
        loss: Returns the mean loss over these samples, from the model's outputs and them.
        optimizer: Returns the optimizer over the model, or a list of several; these take turns in backward and clip.
        before_step: Called with the number of each step, the model and its optimizer, before the step.
        steps: Number of steps.
        micro_batches: Batches of each replica in a step, all but the last under ``no_sync``.
        max_norm: Clip gradients by this norm, which is compared too.
        max_value: Clip gradients by value.
        shows_clipped: Compare gradients after clipping too: no parameter shows those that no optimizer steps.
        no_effect: Patterns of the names of parameters whose gradient is rounding alone; their values are not compared.
        tolerance: Of all comparisons.
        loss_atol: What losses may differ by besides, where they are small differences of large terms.
        elements: ``rtol`` and ``atol`` of each element of gradients and parameters, in place of the tolerance.
        outputs: Compare what the model returns for each batch, too, and for one more in evaluation.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor] = own_loss
    optimizer: Callable[[nn.Module], Any] = sgd
    before_step: Callable[[int, nn.Module, Any], None] | None = None
    steps: int = 3
    micro_batches: int = 1
    max_norm: float | None = 0.5
    max_value: float | None = None
    shows_clipped: bool = False
    no_effect: tuple[str, ...] = ()
    tolerance: Tolerance = _CLOSE
    loss_atol: float = 0.0
    elements: tuple[float, float] | None = None
    outputs: bool = False

    def make(self):
        """Return the model and its optimizer, or its optimizers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = self.build()
        return model, self.optimizer(model)


def zoo_case(name, *, samples=4, double=False, **changes):
    """Return a case of a model of the zoo, with four samples a batch; ``double`` trains it in fp64."""
    functions = {
        "build": partial(_zoo_model, name, double),
        "batch": partial(_zoo_batch, name, samples, double),
        "loss": partial(_zoo_loss, name),
    }
    return Case(**{**functions, "optimizer": decayed, "no_effect": get_model(name).no_effect, **changes})


def _zoo_model(name, double):
    model = get_model(name).seeded()
    return model.double() if double else model


def _zoo_batch(name, samples, double, number, replica):
    batch = get_model(name).share(number, replica, samples)
    return in_double(batch) if double else batch


def _zoo_loss(name, outputs, batch):
    return get_model(name).loss(outputs, batch)


@dataclass(frozen=True)
class Setting:
    """A plugin with options, on a number of ranks.

    Args:
        plugin: The plugin's class, or a function that returns a plugin.
        options: Its arguments.
        num_ranks: Number of ranks.
        precision: As for `Booster`.
        device: As for `Booster`; `driven_runs` place batches on it.
    """

    plugin: Callable[..., Plugin]
    options: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    precision: str | None = None
    device: str = "cpu"

    def make_booster(self):
        """Return a Booster with a new plugin."""
        return Booster(self.device, self.precision, self.plugin(**self.options))


@dataclass
class WithOutputs(Trained):
    """A training, and the tensors in what the model returned: by path, for each batch of each replica."""

    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass
class OnRank:
    """What a rank tells: its training, its replica of the model, how many there are, and what the test asked for."""

    trained: WithOutputs
    replica: int
    num_replicas: int
    told: Any = None


@lru_cache(maxsize=8)
def train_plainly(case, num_replicas, parts=1):
    """Train in this process on the samples of all replicas, with plain torch.

    Args:
        case: What to train; the results of the last few are remembered.
        num_replicas: Number of replicas.
        parts: Number of equal parts in which a batch goes through the model, whose losses are averaged.
    """
    model, optimizer = case.make()
    named = {name: model.get_parameter(path) for name, path in parameter_paths(model).items()}
    trained = WithOutputs()
    look = partial(_look, trained.gradients, named, attrgetter("grad"))
    weight = 1 / (num_replicas * case.micro_batches * parts)
    for step in range(case.steps):
        if case.before_step is not None:
            case.before_step(step, model, optimizer)
        trained.losses.append(0.0)
        for number in _batches(case, step):
            for replica in range(num_replicas):
                for part in _parts(case.batch(number, replica), parts):
                    outputs = call(model, part)
                    loss = case.loss(outputs, part) * weight
                    loss.backward()
                    _note(case, outputs, trained.outputs)
                    trained.losses[-1] += float(loss.detach())
        look()
        if case.max_norm is not None:
            trained.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)))
        if case.max_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), case.max_value)
        if case.shows_clipped:
            look()
        _step(optimizer)
    trained.parameters = {name: parameter.detach() for name, parameter in named.items()}
    _evaluate(case, model, range(num_replicas), lambda batch: _note(case, call(model, batch), trained.outputs))
    return trained


def train_boosted(case, setting, tell=None, checkpoint=None, then=None):
    """Train under a plugin on this rank's samples.

    Args:
        case: What to train.
        setting: Under what.
        tell: Called with the Booster, the model and the optimizer in the end; its result is passed on.
        checkpoint: Save here in the middle, and go on in new objects, whose trained parameters were zeros.
        then: Under what to go on.

    Collective: every rank of the world.
    """
    booster = setting.make_booster()
    net, optimizer = case.make()
    paths = parameter_paths(net)
    model, optimizer, *_ = booster.boost(net, optimizer)
    replica, num_replicas = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    trained = WithOutputs()
    for step in range(case.steps):
        if checkpoint is not None and step == case.steps // 2:
            booster.save_checkpoint(checkpoint, model=model, optimizer=optimizer, step=step)
            booster = (then or setting).make_booster()
            net, optimizer = case.make()
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.requires_grad:
                        parameter.zero_()
            model, optimizer, *_ = booster.boost(net, optimizer)
            replica, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
            booster.load_checkpoint(checkpoint, model=model, optimizer=optimizer)
        if case.before_step is not None:
            case.before_step(step, model.unwrap(), optimizer)
        numbers = _batches(case, step)
        losses = []
        for number in numbers:
            is_last = number == numbers[-1]
            with contextlib.nullcontext() if is_last else booster.no_sync(model, optimizer):
                losses.append(_backward(booster, model, optimizer, case, number, replica, trained.outputs))
        trained.losses.append(_mean_over_ranks(losses))
        look = partial(_look, trained.gradients, paths, partial(full_gradient, booster, model))
        look()
        clipping = _taking_turns(optimizer, step)
        if case.max_norm is not None:
            trained.norms.append(float(clipping.clip_grad_by_norm(case.max_norm)))
        if case.max_value is not None:
            clipping.clip_grad_by_value(case.max_value)
        if case.shows_clipped:
            look()
        _step(optimizer)
    whole = whole_model(booster, model)
    trained.parameters = {name: whole[name] for name in paths}
    _evaluate(case, model, [replica], lambda batch: _forward(booster, model, case, batch, trained.outputs))
    told = None if tell is None else tell(booster, model, optimizer)
    return OnRank(trained, replica, num_replicas, told)


def assert_equals_one_process(case, setting, *, parts=1, tell=None, checkpoint=None, then=None):
    """Assert that ranks train as one process does: each step's loss, gradients and norm, and the parameters after them.

    A test that ranks call (`ranked.on_ranks`) may have functions and classes of its own in the case. All of them call
    this then.

    Args:
        case: What is trained.
        setting: Under what.
        parts: Number of parts in which a pipeline runs a batch, if the loss couples samples.
        tell: As for `train_boosted`.
        checkpoint: As for `train_boosted`.
        then: As for `train_boosted`.

    Returns:
        What each rank told.
    """
    given = (case, setting, tell, checkpoint, then)
    if dist.is_initialized():
        results = [None] * setting.num_ranks
        dist.all_gather_object(results, train_boosted(*given))
    else:
        results = run_on_ranks(train_boosted, setting.num_ranks, *given, timeout_seconds=120)
    expected = train_plainly(case, results[0].num_replicas, parts)
    for result in results:
        assert_same_training(result.trained, expected, case)
        pairs = zip(result.trained.outputs, expected.outputs[result.replica :: result.num_replicas], strict=True)
        for found, plain in pairs:
            if found:
                assert_same_tensors(found, plain, case.tolerance)
    if case.outputs:
        assert any(any(result.trained.outputs) for result in results), "no rank returns outputs"
    return [result.told for result in results]


def parameter_paths(model):
    """Return the path to each parameter by its name, which leaves out peft's wrappers."""
    names = NamedTensors.of(model).name_of
    return {names[id(parameter)]: path for path, parameter in model.named_parameters()}


def assert_same_training(actual, expected, case):
    """Assert that two trainings of a case are the same: losses, gradients, norms and parameters."""
    close = {"rel": case.tolerance.relative, "abs": 0.0}
    assert actual.losses == pytest.approx(expected.losses, rel=close["rel"], abs=case.loss_atol), "losses"
    for look, (found, plain) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        _assert_same(found, plain, case, f"gradients of step {look // (1 + case.shows_clipped)}")
    assert actual.norms == pytest.approx(expected.norms, **close), "norms"
    kept = {name for name in expected.parameters if not _has_no_effect(case, name)}
    ours, theirs = ({name: each.parameters[name] for name in kept} for each in (actual, expected))
    _assert_close(ours, theirs, case)


def call(model, batch):
    """Return the model's outputs for a batch; entries of a mapping that it does not take are for the loss alone."""
    if isinstance(batch, Mapping):
        return model(**taken_by(unwrap_model(model), batch))
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _assert_same(found, plain, case, what):
    assert found.keys() == plain.keys(), what
    kept = [name for name in plain if not _has_no_effect(case, name)]
    scale = max(float(gradient.abs().max()) for gradient in plain.values() if gradient.numel())
    for name in plain.keys() - kept:
        assert float(found[name].abs().max()) <= _NO_EFFECT * scale, f"{what}: {name} has an effect"
    try:
        _assert_close({name: found[name] for name in kept}, {name: plain[name] for name in kept}, case)
    except AssertionError as error:
        msg = f"{what}: {error}"
        raise AssertionError(msg) from None


def _assert_close(found, plain, case):
    if case.elements is None:
        assert_same_tensors(found, plain, case.tolerance)
    else:
        rtol, atol = case.elements
        torch.testing.assert_close(found, plain, rtol=rtol, atol=atol)


def _has_no_effect(case, name):
    return any(fnmatch(name, pattern) for pattern in case.no_effect)


def _batches(case, step):
    return range(step * case.micro_batches, (step + 1) * case.micro_batches)


def _look(gradients, sources, gradient_of):
    """Note the gradients that there are, by name."""
    found = {name: gradient_of(source) for name, source in sources.items()}
    gradients.append({name: gradient.clone() for name, gradient in found.items() if gradient is not None})


def _step(optimizer):
    """Step, one optimizer after the other: what one drops is not the others'."""
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.step()
        each.zero_grad()


def _taking_turns(optimizer, number):
    return optimizer[number % len(optimizer)] if isinstance(optimizer, list) else optimizer


def _forward(booster, model, case, batch, noted, optimizer=None):
    """Run forward of a batch, and backward in a pipeline; return its loss, ``None`` on ranks that do not have it."""

    def loss_of(outputs, batch):
        return case.loss(outputs, batch) / case.micro_batches

    if _is_pipeline(booster):
        asked = {"return_loss": True, "return_outputs": case.outputs}
        result = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer, **asked)
        _note(case, result.get("outputs"), noted)
        return result["loss"]
    outputs = call(model, batch)
    _note(case, outputs, noted)
    return loss_of(outputs, batch)


def _backward(booster, model, optimizer, case, number, replica, noted):
    """Run forward and backward of a batch; return its loss, not a number on ranks that do not have it."""
    loss = _forward(booster, model, case, case.batch(number, replica), noted, optimizer)
    if loss is None:
        return math.nan
    if not _is_pipeline(booster):
        booster.backward(loss, _taking_turns(optimizer, number))
    return float(loss.detach()) * case.micro_batches


def _evaluate(case, model, replicas, run):
    """Run the batch after the last one, if its outputs are compared."""
    if case.outputs:
        model.eval()
        with torch.no_grad():
            for replica in replicas:
                run(case.batch(_batches(case, case.steps)[0], replica))


def _is_pipeline(booster):
    return getattr(booster.plugin, "pp_size", 1) > 1


def _note(case, outputs, noted):
    """Note what a model returned, nothing where a stage does not have it."""
    if case.outputs:
        noted.append({where: tensor.detach().clone() for where, tensor in tensors_of(outputs)})


def _mean_over_ranks(losses):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, sum(losses) / len(losses))
    known = [loss for loss in found if not math.isnan(loss)]
    return sum(known) / len(known)


def _parts(batch, count):
    if count == 1:
        return [batch]
    cut = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: pieces[index] for name, pieces in cut.items()} for index in range(count)]
