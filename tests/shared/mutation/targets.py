"""The modules whose faults the tests are to find, and the tests that find them: unit tests, which need no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Target:
    """A module to plant faults in.

    Args:
        module: Its dotted name.
        tests: Files whose tests are to find the faults, below ``tests``.
        functions: The functions and classes with arithmetic; all when empty.
        select: Which of the files' tests to run, as for pytest's ``-k``; all when empty.
    """

    module: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()
    select: str = ""

    @property
    def path(self):
        """The module's source."""
        package, *rest = self.module.split(".")
        folder = ROOT / "packages" / package.replace("_", "-") / "src" / package
        return folder.joinpath(*rest).with_suffix(".py")


TARGETS = {
    # which slice of a flat bucket belongs to which rank
    "zero/partition": Target(
        "booster_zero.engine.partition",
        ("zero/test_sharding_partition.py",),
        (
            *("", "Slot", "BucketPlan", "default_bucket_bytes", "plan_flat", "plan_whole", "assign_owners"),
            *("_fill", "_lay_out", "_share", "_even_bounds", "_aligned"),
        ),
    ),
    "runtime/placements": Target(
        "booster_runtime.sharding.placements",
        ("runtime/test_placements.py",),
    ),
    "runtime/ranks": Target(
        "booster_runtime.sharding.ranks",
        ("runtime/test_sharding_layers.py",),
        ("sharding_groups",),
    ),
    "runtime/state_owners": Target(
        "booster_runtime.sharding.hosting",
        ("runtime/test_hosted_optimizer.py",),
        ("piece_shard",),
    ),
    "hybrid/split": Target(
        "booster_hybrid.tensor_parallel.split",
        ("hybrid/test_split.py",),
    ),
    "hybrid/layout": Target(
        "booster_hybrid.sequence_parallel.exchange",
        ("hybrid/test_sequence_layout.py",),
        ("SequenceLayout",),
    ),
    "hybrid/microbatches": Target(
        "booster_hybrid.pipeline.batches",
        ("hybrid/test_pipeline_microbatches.py",),
        ("share_samples", "split_batch"),
    ),
    # boxes and ranges of shards, and what they have in common
    "core/shard": Target(
        "booster_core.state.shard",
        ("core/test_shard.py", "core/test_state_regions.py"),
    ),
    "checkpoint/owners": Target(
        "booster_checkpoint.save.owners",
        ("checkpoint/test_owner_windows.py",),
        ("_windows", "_Share", "_shares"),
    ),
    "checkpoint/reading": Target(
        "booster_checkpoint.files.byte_file",
        ("checkpoint/test_strided_boxes.py",),
        ("read_box", "as_array"),
    ),
    "checkpoint/open_file": Target(
        "booster_checkpoint.storage.open_file",
        ("checkpoint/test_strided_boxes.py",),
        ("read_into", "read_error"),
    ),
    "checkpoint/strided": Target(
        "booster_checkpoint.save.in_place",
        ("checkpoint/test_strided_boxes.py",),
        ("write_box",),
    ),
    # norms, sums over ranks and clipping
    "core/gradients": Target(
        "booster_core.gradients",
        ("core/test_gradients.py",),
    ),
    "runtime/sums": Target(
        "booster_runtime.collectives.sums",
        ("runtime/test_sums.py",),
        ("sum_into", "combine_into", "scale_of", "overlaps"),
    ),
    # pipeline schedules
    "hybrid/schedule": Target(
        "booster_hybrid.pipeline.schedule",
        ("hybrid/test_hybrid_schedule.py",),
    ),
    # partial softmaxes that are put together
    "hybrid/ring": Target(
        "booster_hybrid.sequence_parallel.ring_attention",
        ("hybrid/test_ring_attention.py",),
        ("", "AttentionCall", "_Settings", "ring_attention", "_at_once", "_Ring", "_places"),
    ),
    "hybrid/ring_travel": Target(
        "booster_hybrid.sequence_parallel.ring_attention",
        ("hybrid/test_ring_attention.py",),
        ("visits", "GradientRing", "_numel", "_pass_on", "_packed", "_unpacked"),
    ),
    # the loss scale
    "core/loss_scaler": Target(
        "booster_core.precision.loss_scaler",
        ("core/test_loss_scaler.py", "core/test_gradients.py"),
    ),
}
