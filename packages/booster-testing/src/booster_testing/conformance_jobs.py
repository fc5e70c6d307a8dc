"""The jobs of `PluginConformance`, by name."""

from __future__ import annotations

from typing import Any

from booster_core.plugin import Capability
from booster_testing import conformance_runs as runs
from booster_testing.jobs import Job
from booster_testing.models import TinyRouted, TinyStateful
from booster_testing.training import train_boosted

_SYNCHRONOUS = (Capability.SYNCHRONOUS,)
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "equal": {"micro_batches": (2, 2)},
    "unequal": {"micro_batches": (3, 1, 2)},
    "with a rest": {"micro_batches": (2, 2), "loop": "rest"},
}
"""Settings of trainings that accumulate gradients."""
LOOPS = (
    "two losses",
    "two losses under no_sync",
    "two forwards",
    "one loss of two forwards",
    "evaluation between",
    "dropped gradients",
    "norm between",
    "backward of the loss",
)
"""Other loops of `booster_testing.loops` whose steps must equal those of one process."""
NORMS = ((0.05, 1.0), (0.05, 2.0), (0.05, float("inf")), (100.0, 2.0))
"""Largest norms and their types."""


def stateful_without_dropout() -> TinyStateful:
    """Return the model with running statistics and extra state, whose results can be compared with one process."""
    return TinyStateful(dropout=0.0)


def _train(*needs: Capability, **changes: Any) -> Job:
    return Job(function=train_boosted, changes=changes, needs=needs)


JOBS: dict[str, Job] = {
    "boost": Job(function=runs.boost_returns_wrappers),
    "describe": Job(function=runs.describe),
    "start": Job(function=runs.boost_and_view_locally, raises=True),
    # ---- training
    **{name: _train(optimizer=name) for name in ("adamw", "sgd")},
    **{name: _train(*_SYNCHRONOUS, optimizer=name) for name in ("adafactor", "muon")},
    "adamw, lazy": _train(Capability.LAZY_INIT, lazy=True),
    "adamw, many steps": _train(steps=12),
    "adamw, again": _train(),
    "replicas": Job(function=runs.train_and_view_locally, needs=_SYNCHRONOUS),
    **{f"accumulation, {name}": _train(optimizer="sgd", **changes) for name, changes in ACCUMULATIONS.items()},
    **{f"loop, {loop}": _train(*_SYNCHRONOUS, optimizer="sgd", micro_batches=(2, 3), loop=loop) for loop in LOOPS},
    "zeroed gradients": _train(*_SYNCHRONOUS, optimizer="sgd", set_to_none=False),
    **{
        f"norm, {max_norm} {norm_type}": _train(optimizer="sgd", max_norm=max_norm, norm_type=norm_type)
        for max_norm, norm_type in NORMS
    },
    "clip value": _train(*_SYNCHRONOUS, optimizer="sgd", clip_value=0.01),
    "nonfinite": Job(function=runs.clip_an_infinite_gradient, arguments=(False,)),
    "nonfinite, error": Job(function=runs.clip_an_infinite_gradient, arguments=(True,), raises=True),
    "traffic": Job(function=runs.traffic_of_backward, needs=_SYNCHRONOUS),
    "old graph": Job(function=runs.backward_through_an_old_graph, needs=_SYNCHRONOUS, changes={"optimizer": "sgd"}),
    # ---- precision
    **{
        f"precision, {name}": _train(
            Capability(name), optimizer="sgd", precision=name, max_norm=1.0, micro_batches=(2, 3)
        )
        for name in ("fp32", "bf16", "fp16")
    },
    "overflow": Job(function=runs.overflow_skips_the_step, needs=(Capability.FP16,), changes={"precision": "fp16"}),
    # ---- optimizer, scheduler, data, hooks
    "scheduler": Job(function=runs.scheduler_steers),
    "optimizer state": Job(function=runs.optimizer_state_is_kept, needs=_SYNCHRONOUS),
    "loader": Job(function=runs.samples_of_a_plain_loader, needs=(Capability.DATA_PARALLEL,)),
    "after_step": Job(function=runs.after_step_hook_sees_metrics),
    "evaluation": Job(function=runs.evaluates),
    # ---- user errors
    "boost twice": Job(function=runs.boost_twice, raises=True),
    "foreign optimizer": Job(function=runs.boost_with_foreign_optimizer, raises=True),
    "gradients before boost": Job(function=runs.boost_with_gradients, raises=True),
    "vector": Job(function=runs.backward_of_a_vector, raises=True),
    "no gradient": Job(function=runs.backward_without_gradient, raises=True),
    "max_norm -1.0": Job(function=runs.clip_by, arguments=(-1.0,), raises=True),
    "max_norm nan": Job(function=runs.clip_by, arguments=(float("nan"),), raises=True),
    "execute_pipeline": Job(function=runs.execute_pipeline, raises=True),
}
OWN_MODEL_JOBS: dict[str, Job] = {
    "used on some ranks": _train(*_SYNCHRONOUS, model_factory=TinyRouted, optimizer="sgd", routed=True),
    "dropout": _train(model_factory=TinyStateful),
    "dropout, again": _train(model_factory=TinyStateful),
    "running statistics": _train(
        *_SYNCHRONOUS, model_factory=stateful_without_dropout, optimizer="sgd", same_batches=True
    ),
}
"""Jobs with models of the kit's own that have more; not run for a plugin that needs a model of its own."""
ADAPTERS = Job(function=runs.trains_adapters)
ADAPTERS_REFUSED = Job(function=runs.trains_adapters, raises=True)
