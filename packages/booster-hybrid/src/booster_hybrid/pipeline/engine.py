"""`PipelineEngine`: takes batches through a pipeline, and lets every rank know when something went wrong on one."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import BoosterError, ConfigError
from booster_core.ranks import NamedCall
from booster_hybrid.pipeline.batches import cut_batch, join_outputs
from booster_hybrid.pipeline.label_means import LabelMeans, other_mean
from booster_hybrid.pipeline.runtime import PipelineRun, RankSchedule
from booster_hybrid.pipeline.schedule import ActionKind, make_schedule
from booster_hybrid.random_streams import MicrobatchStreams, kept_streams, next_seed, preserve_generators
from booster_hybrid.same_training import ToHost, checksum_of, different_batches
from booster_runtime import collectives
from booster_runtime.data import move_batch
from booster_runtime.label_means import are_parts_weighed
from booster_runtime.sharding import control_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_core.ranks import DistCoordinator
    from booster_hybrid.config import PipelineConfig
    from booster_hybrid.mesh import Axis
    from booster_hybrid.optimizer import HybridOptimizer
    from booster_hybrid.pipeline.batches import SplitHook
    from booster_hybrid.pipeline.cut import StagedModel
    from booster_hybrid.pipeline.p2p import P2PChannel
    from booster_hybrid.pipeline.schedule import Schedule
    from booster_hybrid.weight_reads import DirectWeightUses

_MOST_WAIT = 5.0
"""Seconds for which a rank that has failed waits for others to fail alike; they wait for it in a collective else."""


class PipelineEngine:
    """Forward and backward of whole batches.

    Args:
        staged: The model, cut into stages.
        config: How batches are cut, and in which order their parts are worked off.
        index: This rank's position in the pipeline.
        link: Messages to the others.
        replica: The ranks that get the same batches: those of the pipeline, and of what else splits the model.
        data: The ranks that get different ones.
        sharing: The ranks that compute each stage together, along each axis.
        coordinator: Carries errors to all ranks.
        device: Where batches are moved.
        gathered: Makes a context in which the stages' parameters can be read.
        written: Returns an error if stages have written into these parameters there, where that is lost.
        outside_reads: Looks at losses; ``None`` where each rank has whole parameters.
        exchanges_tokens: Whether data parallel ranks take part in each other's microbatches, as spread experts do.
        draws_on_host: Whether the model draws from the generators of Python or numpy.
        split_hook: Splits batches in place of `split_batch`; see `HybridParallelPlugin`.
        run_options: Further arguments of each `PipelineRun`.

    Attributes:
        staged: As above.
    """

    def __init__(
        self,
        staged: StagedModel,
        config: PipelineConfig,
        index: int,
        link: P2PChannel,
        *,
        replica: Axis,
        data: Axis,
        sharing: Sequence[Axis],
        coordinator: DistCoordinator,
        device: torch.device,
        gathered: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        written: Callable[[], Exception | None] = lambda: None,
        outside_reads: DirectWeightUses | None = None,
        exchanges_tokens: bool = False,
        draws_on_host: bool = False,
        split_hook: SplitHook | None = None,
        run_options: dict[str, Any] | None = None,
    ) -> None:
        self.staged = staged
        self._gathered, self._written, self._outside_reads = gathered, written, outside_reads
        self._exchanges_tokens, self._split_hook = exchanges_tokens, split_hook
        self._draws_on_host = draws_on_host
        self._config, self._index, self._link = config, index, link
        self._replica, self._data, self._coordinator, self._device = replica, data, coordinator, device
        self._sharing = [axis for axis in sharing if axis.size > 1]
        self._run_options = {**(run_options or {}), "failed_alone": self._has_failed_alone}
        self._schedules: dict[int, Schedule] = {}
        self._itineraries: dict[tuple[int, bool], RankSchedule] = {}
        self._num_batches = 0
        self._means_before: ToHost | None = None
        self._has_warned = False

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return who does what in a batch of so many microbatches."""
        known = self._schedules.get(num_microbatches)
        if known is None:
            config = self._config
            known = make_schedule(config.style, config.size, num_microbatches, config.num_chunks)
            self._schedules[num_microbatches] = known
        return known

    def rank_schedule(self, num_microbatches: int, *, trains: bool) -> RankSchedule:
        """Return what this rank does and exchanges in a batch of so many microbatches."""
        known = self._itineraries.get((num_microbatches, trains))
        if known is None:
            schedule = self.schedule(num_microbatches)
            splits = trains and schedule.is_split and self._run_options.get("split") is not None
            known = RankSchedule(schedule, self._index, trains=trains, splits=splits)
            self._itineraries[num_microbatches, trains] = known
        return known

    def execute(
        self,
        batches: Iterator[Any],
        criterion: Callable[[Any, Any], Tensor],
        optimizer: HybridOptimizer | None,
        *,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Take the next batch forward and, with an optimizer, back; see `PipelinePlugin.execute_pipeline`.

        Raises:
            StopIteration: If there is no batch left.
            ConfigError: If the batch can't be split, or ranks that need the same one have different ones.
            Exception: What the data loader, the model or the criterion raised on any rank.

        Collective: every rank of the world.
        """
        with NamedCall("execute_pipeline"):
            taken = self._take(batches)
            most, seed = self._agree(taken)
            if not taken.parts:  # the first rank has none, and all others have heard of that
                self._raise_together(taken.error, optimizer)
            parts, sizes = taken.parts, taken.sizes
            schedule = self.schedule(len(parts))
            self._warn_if_idle(schedule)
            shares = [size / sum(sizes) for size in sizes]
            is_weighed = are_parts_weighed() or len(parts) == 1 or taken.has_failed
            means = None if is_weighed else LabelMeans(parts, shares)
            run = PipelineRun(
                self.staged,
                schedule,
                self._index,
                self._link,
                parts,
                shares,
                criterion,
                None if optimizer is None else optimizer.backward_stage,
                keeps_outputs=return_outputs,
                rank_schedule=self.rank_schedule(len(parts), trains=optimizer is not None),
                streams=self._streams(seed, len(parts)),
                means=means,
                reads=None if optimizer is None else self._outside_reads,
                **self._run_options,
            )
            if taken.has_failed:
                run.fail(taken.error)
            if optimizer is not None:
                run.loss_factor = optimizer.begin_batch(most)
            with self._gathered(), self._kept_generators():
                run.run()
            if optimizer is not None:
                backwards = [each for each in schedule.actions(self._index) if each.work is not ActionKind.FORWARD]
                optimizer.finish_batch(missing_rounds=(most - len(parts)) * (len(backwards) // len(parts)))
            error, outputs = run.error or self._written(), None
            if means is not None and error is None:
                error = self._check_means(means)
            if error is None and run.outputs:
                try:
                    found = [run.outputs[index] for index in range(len(parts))]
                    outputs = join_outputs(found, sizes)
                except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
                    error = caught
            self._raise_together(error, optimizer)
        result: dict[str, Any] = {}
        if return_loss:
            result["loss"] = torch.stack([*run.losses.values()]).sum() if run.losses else None
        if return_outputs:
            result["outputs"] = outputs
        return result

    def _has_failed_alone(self) -> bool:
        """Return whether ranks that share the stage of this one, which has failed, don't come to say so, too."""
        try:
            for axis in self._sharing:
                self._coordinator.block_all(axis.group, name="failed pipeline stage", timeout_seconds=_MOST_WAIT)
        except BoosterError:
            return True
        return False

    def _check_means(self, means: LabelMeans) -> Exception | None:
        """Return an error if losses of this batch were means over other labels; on a device, of the one before."""
        differs = means.differs()
        now = None if differs is None else ToHost(differs)
        before, self._means_before = self._means_before, now
        if now is not None and now.is_here:
            before, self._means_before = now, None
        return other_mean() if before is not None and bool(before.wait()) else None

    def _streams(self, seed: int, num_microbatches: int) -> list[MicrobatchStreams]:
        return [
            MicrobatchStreams(seed, index, self._device, host=self._draws_on_host) for index in range(num_microbatches)
        ]

    @contextlib.contextmanager
    def _kept_generators(self) -> Iterator[None]:
        """Leave the generators to scripts as the ranks had them, so that these draw alike on all of them."""
        with kept_streams(self._device), preserve_generators() if self._draws_on_host else contextlib.nullcontext():
            yield

    def _take(self, batches: Iterator[Any]) -> _Taken:
        """Take the next batch, and note what this rank finds of it."""
        self._num_batches += 1
        taken = _Taken()
        try:
            batch = next(batches)
            taken.checksum = checksum_of(batch, self._num_batches)
            batch = move_batch(batch, self._device)
            taken.parts, taken.sizes = cut_batch(batch, self._config, self._split_hook)
        except Exception as caught:  # noqa: BLE001 - carried to every rank
            taken.error, taken.has_failed = caught, True
        return taken

    def _agree(self, taken: _Taken) -> tuple[int, int]:
        """Compare what the ranks have taken.

        A pipeline that is alone tells each rank what the ranks before have; one that differs, or has failed, goes
        through the batch as one that fails in it. Others meet before: ranks that share a stage communicate in it.

        Returns:
            The largest number of microbatches on any rank, and the number from which the batch's random numbers are
            made.

        Raises:
            ConfigError: If ranks of other pipelines, or of one stage, have other batches.
            Exception: What such a rank raised.

        Collective: every rank of the world.
        """
        # Data parallel ranks may have other batches, of other sizes; those that work on the same batch may not.
        seed = next_seed()  # on each rank, so that their generators stay alike
        if self._data.size == 1 and not self._sharing:
            return self._agree_in_turn(taken, seed)
        num_parts, number = len(taken.parts), taken.checksum
        told = [taken.has_failed, num_parts, -num_parts, number, -number, 0 if self._replica.index else seed]
        has_failed, most, least, highest, lowest, seed = self._largest(told, self._replica)
        if not has_failed and (highest, most) != (-lowest, -least):
            taken.error, has_failed = different_batches(list(self._replica.ranks)), True
        has_failed, most, least = self._largest([has_failed, most, least], self._data)
        if has_failed:
            with self._coordinator.together("execute_pipeline"):
                if taken.error is not None:
                    raise taken.error
        if self._exchanges_tokens and most != -least:
            msg = (
                f"Batches have {-least} microbatches on some ranks and {most} on others, and `ep_size` lets ranks send "
                "each other the tokens of each. Use `num_microbatches`, or batches of the same size on all ranks."
            )
            raise ConfigError(msg)
        return most, seed

    def _agree_in_turn(self, taken: _Taken, seed: int) -> tuple[int, int]:
        """Compare what this rank has taken with what the ranks before have; see `_agree`."""

        def compared(before: list[int]) -> list[int]:
            has_failed, count, checksum, seed = before
            if not (has_failed or taken.has_failed) and (count, checksum) != (len(taken.parts), taken.checksum):
                taken.error = different_batches(list(self._replica.ranks))
            taken.has_failed = bool(has_failed or taken.error)
            if taken.has_failed:  # the others go through their schedule, and wait for what is due in that
                taken.parts, taken.sizes = [None] * count, [1] * count
            return [taken.has_failed, count, checksum, seed]

        own = [taken.has_failed, len(taken.parts), taken.checksum, seed]
        _, most, _, seed = self._link.hand_on(own, compared)
        return most, seed

    def _largest(self, values: Sequence[int], axis: Axis) -> list[int]:
        """Return the largest one of the ranks of an axis for each number; two axes cost less than the world at once.

        Collective: the ranks of the axis.
        """
        if axis.size == 1:
            return [*values]
        told = torch.tensor(values, dtype=torch.int64, device=control_device(self._device, axis.group))
        collectives.all_reduce(told, dist.ReduceOp.MAX, axis.group).wait()
        found: list[int] = told.tolist()
        return found

    def _raise_together(self, error: Exception | None, optimizer: HybridOptimizer | None) -> None:
        (has_failed,) = self._largest(self._largest([error is not None], self._replica), self._data)
        if has_failed:
            if optimizer is not None:
                for each in optimizer.scaling.optimizers:
                    each.zero_grad()  # of a part of the batch, and of some ranks only
            with self._coordinator.together("execute_pipeline"):
                if error is not None:
                    raise error

    def _warn_if_idle(self, schedule: Schedule) -> None:
        size = self._config.size
        if self._has_warned or schedule.num_microbatches >= size:
            return
        self._has_warned = True
        if self._coordinator.rank == 0:
            idle = sum(schedule.idle_share(rank) for rank in range(size)) / size
            msg = (
                f"{schedule.num_microbatches} microbatch(es) leave each of the {size} ranks of the pipeline idle for "
                f"{idle:.0%} of a step. Use at least {size}, better {4 * size}."
            )
            warnings.warn(msg, stacklevel=4)


@dataclass
class _Taken:
    """What a rank has found of a batch.

    Args:
        parts: Its microbatches.
        sizes: Their numbers of samples.
        checksum: What tells it from other batches.
        error: What went wrong.
        has_failed: Whether something did, here or on a rank that has told of it.
    """

    parts: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    checksum: int = 0
    error: Exception | None = None
    has_failed: bool = False
