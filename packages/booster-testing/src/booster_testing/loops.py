"""What a user's loop does between two optimizer steps, written once for plain torch and for a boosted run.

A loop is called as ``loop(run, step)``. It must leave the gradients of one process with the global batch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from booster_testing.training import PlainRun

_OTHER = 10
"""Offset to micro-batches that are not among those of the step."""


def accumulate(run: PlainRun, step: int) -> None:
    """Run all micro-batches, all but the last under ``no_sync``."""
    last = len(run.training.micro_batches) - 1
    for micro in range(last + 1):
        with run.no_sync() if micro < last else contextlib.nullcontext():
            run.backward(run.loss(step, micro))


def leave_a_rest(run: PlainRun, step: int) -> None:
    """Run micro-batches in pairs; the epoch ends after the first one of the last pair, which is under ``no_sync``."""
    for micro in range(1 if step == run.training.steps - 1 else 2):
        with run.no_sync() if micro == 0 else contextlib.nullcontext():
            run.backward(run.loss(step, micro))


def two_losses(run: PlainRun, step: int) -> None:
    """Run backward from two losses of one forward."""
    tokens = run.tokens(step)
    logits = run.forward(tokens)
    run.backward(run.loss_of(logits, tokens), retain_graph=True)
    run.backward(run.second_loss_of(logits))


def two_losses_under_no_sync(run: PlainRun, step: int) -> None:
    """Run backward from two losses of one forward under ``no_sync``."""
    with run.no_sync():
        two_losses(run, step)


def two_forwards(run: PlainRun, step: int) -> None:
    """Run two forwards, and then backward from each."""
    first, second = run.loss(step, 0), run.loss(step, 1)
    run.backward(first)
    run.backward(second)


def one_loss_of_two_forwards(run: PlainRun, step: int) -> None:
    """Run backward from the sum of two forwards' losses."""
    run.backward(run.loss(step, 0) + run.loss(step, 1))


def evaluate_between(run: PlainRun, step: int) -> None:
    """Evaluate between forward and backward, and between backward and step."""
    loss = run.loss(step)
    _evaluate(run, step)
    run.backward(loss)
    _evaluate(run, step)


def _evaluate(run: PlainRun, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss(step, _OTHER)
    run.model.train()


def drop_gradients(run: PlainRun, step: int) -> None:
    """Drop gradients by ``zero_grad``, reduced and accumulated ones, before those of the step."""
    for micro, set_to_none in ((_OTHER, True), (_OTHER + 1, False)):
        run.backward(run.loss(step, micro))
        run.optimizer.zero_grad(set_to_none=set_to_none)
        with run.no_sync():
            run.backward(run.loss(step, micro))
        run.optimizer.zero_grad(set_to_none=set_to_none)
    run.backward(run.loss(step))


def measure_norm_between(run: PlainRun, step: int) -> None:
    """Read the norm in the middle of an accumulation."""
    with run.no_sync():
        run.backward(run.loss(step, 0))
    run.measure_norm()
    with run.no_sync():
        run.backward(run.loss(step, 1))


def backward_of_the_loss(run: PlainRun, step: int) -> None:
    """Call the loss's own ``backward`` in place of the Booster's, under ``no_sync`` and outside of it."""
    with run.no_sync():
        run.backward(run.loss(step, 0), directly=True)
    run.backward(run.loss(step, 1), directly=True)


LOOPS = {
    "micro-batches": accumulate,
    "rest": leave_a_rest,
    "two losses": two_losses,
    "two losses under no_sync": two_losses_under_no_sync,
    "two forwards": two_forwards,
    "one loss of two forwards": one_loss_of_two_forwards,
    "evaluation between": evaluate_between,
    "dropped gradients": drop_gradients,
    "norm between": measure_norm_between,
    "backward of the loss": backward_of_the_loss,
}
