"""Steps whose norms do not depend on the mesh, for checkpoints that other meshes go on from."""

import contextlib

import pytest

from booster_testing import run_on_ranks


def step_once(booster, model, optimizer, batch):
    """Take a step, on the same four samples whatever the number of ranks, and return its gradients' norm."""
    if getattr(model, "engine", None) is not None:
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    else:
        halves = [{key: value[start : start + 2] for key, value in batch.items()} for start in (0, 2)]
        for index, half in enumerate(halves):
            with booster.no_sync(model, optimizer) if index == 0 else contextlib.nullcontext():
                booster.backward(model(**half).loss / 2, optimizer)
    norm = float(optimizer.clip_grad_by_norm(0.5))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def norms_on_ranks(function, num_ranks, *args):
    """Return the norms that all ranks agree on."""
    per_rank = run_on_ranks(function, num_ranks, *args)
    assert all(norms == pytest.approx(per_rank[0], rel=1e-6) for norms in per_rank)
    return per_rank[0]
