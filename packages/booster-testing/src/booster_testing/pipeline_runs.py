"""Functions that `booster_testing.pipeline_conformance` runs on each rank."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_core.ranks import DistCoordinator
from booster_runtime import full_gradient
from booster_runtime.lazy import LazyInitContext
from booster_testing.models import TinyStack
from booster_testing.training import Trained, Training, summed_loss, whole_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from booster_core import Booster


@dataclass(frozen=True, kw_only=True)
class PipelineTraining(Training):
    """A training of `TinyStack`; each micro-batch is one batch of ``execute_pipeline``."""

    def make_model(self, *, lazy: bool = False) -> TinyStack:
        """Return the model, the same each time."""
        with torch.random.fork_rng(devices=[]), LazyInitContext() if lazy else contextlib.nullcontext():
            torch.manual_seed(7)
            return TinyStack(unused=self.unused)


def mean_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the next-token loss of a microbatch, a mean over its samples."""
    return summed_loss(logits, batch["tokens"]) / len(batch["tokens"])


def boost(training: PipelineTraining) -> tuple[Booster, Any, Any]:
    """Return a Booster, and the boosted model and optimizer."""
    booster = training.make_booster()
    original = training.make_model(lazy=training.lazy)
    boosted = booster.boost(original, training.make_optimizer(original))
    return booster, boosted.model, boosted.optimizer


def batch_here(training: PipelineTraining, booster: Booster, step: int, micro: int = 0) -> dict[str, Tensor]:
    """Return this pipeline's samples."""
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    return {"tokens": training.batch(step, micro, size)[rank::size]}


def train_in_pipeline(training: PipelineTraining) -> Trained:
    """Train under the plugin; return losses over all ranks, on every rank.

    Collective: every rank of the world.
    """
    booster, model, optimizer = boost(training)
    names = [name for name, parameter in training.make_model().named_parameters() if parameter.requires_grad]
    trained = Trained()
    calls = training.micro_batches
    for step in range(training.steps):
        total = 0.0
        for micro, samples in enumerate(calls):
            share = samples / sum(calls)

            def criterion(logits: Tensor, batch: dict[str, Tensor], share: float = share) -> Tensor:
                return mean_loss(logits, batch) * share

            with booster.no_sync(model, optimizer) if micro < len(calls) - 1 else contextlib.nullcontext():
                batches = iter([batch_here(training, booster, step, micro)])
                result = booster.execute_pipeline(batches, model, criterion, optimizer)
            total += _mean_over_pipelines(result["loss"])
        trained.losses.append(total)
        gradients = {name: full_gradient(booster, model, name) for name in names}
        trained.gradients.append({name: grad for name, grad in gradients.items() if grad is not None})
        if training.max_norm is not None:
            trained.norms.append(float(optimizer.clip_grad_by_norm(training.max_norm, training.norm_type)))
        if training.clip_value is not None:
            optimizer.clip_grad_by_value(training.clip_value)
        optimizer.step()
        optimizer.zero_grad()
    trained.parameters = whole_model(booster, model)
    return trained


def _mean_over_pipelines(loss: Tensor | None) -> float:
    """Return on every rank the mean of the losses of all pipelines."""
    every = DistCoordinator().all_gather_object(None if loss is None else float(loss))
    losses: list[float] = [each for each in every if each is not None]
    assert losses, "no rank has the loss"
    return sum(losses) / len(losses)


def _step(training: PipelineTraining, booster: Booster, model: Any, optimizer: Any, step: int) -> float:
    result = booster.execute_pipeline(iter([batch_here(training, booster, step)]), model, mean_loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return _mean_over_pipelines(result["loss"])


def takes_one_batch(training: PipelineTraining) -> None:
    """Check that each call takes exactly one batch of the iterator."""
    booster, model, optimizer = boost(training)
    seen = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for step in range(3):
            seen.append(step)
            yield batch_here(training, booster, step)

    iterator = batches()
    for step in range(2):
        booster.execute_pipeline(iterator, model, mean_loss, optimizer)
        assert seen == list(range(step + 1)), seen


def returns_outputs(training: PipelineTraining) -> None:
    """Check that outputs of the whole batch are returned with the loss, detached and in the batch's order."""
    booster, model, optimizer = boost(training)
    batch = batch_here(training, booster, 0)
    with torch.no_grad():
        expected = training.make_model()(**batch)
    result = booster.execute_pipeline(iter([batch]), model, mean_loss, optimizer, return_outputs=True)
    outputs = result["outputs"]
    assert (outputs is None) == (result["loss"] is None), "outputs are returned with the loss"
    if outputs is not None:
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-5, atol=1e-6)
    every = DistCoordinator().all_gather_object(outputs is not None)
    assert any(every), "no rank has the outputs"
    optimizer.zero_grad()
    result = booster.execute_pipeline(iter([batch]), model, mean_loss, optimizer, return_loss=False)
    assert result.get("loss") is None
    assert result.get("outputs") is None


def evaluates(training: PipelineTraining, how: str) -> None:
    """Check that evaluation returns the same loss as training, and creates no gradients."""
    booster, model, optimizer = boost(training)
    batch = batch_here(training, booster, 0)
    expected = _mean_over_pipelines(mean_loss(training.make_model()(**batch), batch).detach())
    model.eval()
    with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
        result = booster.execute_pipeline(
            iter([batch]), model, mean_loss, optimizer if how == "no_grad" else None, return_outputs=True
        )
    assert result["outputs"] is None or not result["outputs"].requires_grad
    assert abs(_mean_over_pipelines(result["loss"]) - expected) <= 1e-5 * abs(expected)
    name = next(iter(dict(training.make_model().named_parameters())))
    gradient = full_gradient(booster, model, name)
    assert gradient is None or not gradient.count_nonzero()
    model.train()
    _step(training, booster, model, optimizer, 0)


def criterion_fails(training: PipelineTraining, criterion: Callable[..., Any]) -> None:
    """Run a batch with an invalid criterion."""
    booster, model, optimizer = boost(training)
    booster.execute_pipeline(iter([batch_here(training, booster, 0)]), model, criterion, optimizer)


def goes_on_after_an_error(training: PipelineTraining, criterion: Callable[..., Any]) -> list[float]:
    """Return the losses of two steps, with an error between them that must not change them."""
    booster, model, optimizer = boost(training)
    losses = [_step(training, booster, model, optimizer, 0)]
    try:
        booster.execute_pipeline(iter([batch_here(training, booster, 5)]), model, criterion, optimizer)
    except ArithmeticError:
        losses.append(_step(training, booster, model, optimizer, 1))
    return losses


def without_batches(training: PipelineTraining) -> None:
    """Call ``execute_pipeline`` with an empty iterator."""
    booster, model, optimizer = boost(training)
    booster.execute_pipeline(iter([]), model, mean_loss, optimizer)


def with_the_users_own_model(training: PipelineTraining) -> None:
    """Run a batch through a model that was not boosted."""
    booster, _, optimizer = boost(training)
    booster.execute_pipeline(iter([batch_here(training, booster, 0)]), training.make_model(), mean_loss, optimizer)


def train_and_save(training: PipelineTraining, folder: str, suffix: str) -> list[float]:
    """Train two steps, save, and return the losses of the next three."""
    booster, model, optimizer = boost(training)
    for step in range(2):
        _step(training, booster, model, optimizer, step)
    booster.save_model(model, f"{folder}/model{suffix}", shard=not suffix)
    booster.save_optimizer(optimizer, f"{folder}/optimizer{suffix}", shard=not suffix)
    return [_step(training, booster, model, optimizer, step) for step in range(2, 5)]


def load_and_train(training: PipelineTraining, folder: str, suffix: str) -> list[float]:
    """Load the files of `train_and_save` into a model with other weights, and return the next three losses."""
    booster = training.make_booster()
    original = training.make_model()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(1.0)
    model, optimizer, *_ = booster.boost(original, training.make_optimizer(original))
    assert optimizer is not None, "boost returns an optimizer if it gets one"
    booster.load_model(model, f"{folder}/model{suffix}")
    booster.load_optimizer(optimizer, f"{folder}/optimizer{suffix}")
    return [_step(training, booster, model, optimizer, step) for step in range(2, 5)]
