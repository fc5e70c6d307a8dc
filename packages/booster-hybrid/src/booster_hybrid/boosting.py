"""`HybridSetup`: the steps by which `HybridParallelPlugin.configure` splits a model, each to be called once."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import BoosterError, ConfigError
from booster_core.state import named_modules
from booster_hybrid.axes import make_axes
from booster_hybrid.expert_parallel.apply import ExpertsModule, SpreadExperts, find_experts, spread_experts
from booster_hybrid.expert_parallel.routing import is_evenly_routed
from booster_hybrid.inner_model import inner_model
from booster_hybrid.local_model import LocalModel
from booster_hybrid.mesh import OF_RINGS, with_experts
from booster_hybrid.pipeline.engine import PipelineEngine
from booster_hybrid.pipeline.example import batch_at_hand, check_entries, dry_run_failed, example_batch
from booster_hybrid.pipeline.find_layers import find_layers
from booster_hybrid.pipeline.forms import CutsByForm, outline_of
from booster_hybrid.pipeline.p2p import Link, make_channels
from booster_hybrid.pipeline.per_sample import SampleEntries, lengths_of
from booster_hybrid.pipeline.record import PipelineRecord
from booster_hybrid.pipeline.schedule import ZERO_BUBBLE, make_schedule
from booster_hybrid.pipeline.stages import StagePlan, find_cuts
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.find import expert_rules, given_policy, known_layers, policy_for
from booster_hybrid.policy.from_transformers import language_model, layer_lists
from booster_hybrid.probe.experts import check_experts
from booster_hybrid.probe.lengths import Lengths
from booster_hybrid.probe.probe import ReadOutsideError, check_policy
from booster_hybrid.rank_group import RankGroup
from booster_hybrid.sequence_parallel.stack import Mixers
from booster_hybrid.skipped_layers import kept_generators
from booster_hybrid.tensor_parallel.adapters import without_stacked_adapters
from booster_hybrid.tensor_parallel.plan import TensorParallelModel, parallelize
from booster_hybrid.user_optimizer import check_elementwise, check_state, cut_state, leave_out
from booster_runtime.collectives import new_groups
from booster_runtime.data import move_batch
from booster_runtime.lazy import hollow_objects, is_lazy, place_or_hollow, shards_from_host
from booster_runtime.sharding import (
    ShardingRanks,
    check_distinct_memory,
    raised_on_all,
    working_dtypes,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import nn

    from booster_core.plugin import BoostContext, Boosted
    from booster_hybrid.axes import Axis, MeshShape
    from booster_hybrid.config import HybridConfig
    from booster_hybrid.model import HybridModel
    from booster_hybrid.pipeline.cut import StagedModel
    from booster_hybrid.pipeline.microbatches import SplitHook
    from booster_hybrid.policy.base import ShardingPolicy
    from booster_hybrid.tensor_parallel.split import Split
    from booster_runtime.lazy import Recording


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """Options of the plugin that decide how a model is split; see `HybridParallelPlugin`.

    Args:
        config: The mesh.
        custom_policy: How the model is split, where the user says so.
        example_batch: A batch for the dry run that finds a pipeline's layers.
        split_batch: Splits batches into microbatches; ``None`` splits each tensor along its first dimension.
        parallel_output: Leave logits split.
        unchecked: ``"raise"`` where it can't be found out whether a split layer is right, or ``"allow"``.
        pipeline_record: Where each rank of a pipeline writes down when it did what.
    """

    config: HybridConfig
    custom_policy: ShardingPolicy | None
    example_batch: Any
    split_batch: SplitHook | None
    parallel_output: bool
    unchecked: str
    pipeline_record: str | os.PathLike[str] | None


@dataclass(frozen=True)
class CutModel:
    """A model that is cut into pipeline stages.

    Args:
        staged: Runs this rank's stages.
        split_backward: Lets weight gradients wait; ``None`` where the schedule does not split backward.
        copies: The positions in the pipeline that hold a parameter, by ``id``, of those with more than one.
    """

    staged: StagedModel
    split_backward: SplitBackward | None
    copies: Mapping[int, tuple[int, ...]]


class HybridSetup:
    """Splits one model over a mesh, in place.

    Args:
        options: The plugin's options.
        objects: What the user gave to `boost`.
        context: Device, precision and ranks of the run.
        axes: This rank's groups.
        shape: The mesh.
    """

    def __init__(
        self,
        options: SetupOptions,
        objects: Boosted,
        context: BoostContext,
        axes: Mapping[tuple[str, ...], Axis],
        shape: MeshShape,
    ) -> None:
        self._options, self._config = options, options.config
        self._objects, self._context = objects, context
        self._model: nn.Module = objects.model
        self._axes, self._shape = axes, shape
        self._tensor_group, self._sequence_group, self._expert_group = (
            RankGroup(each.group, each.index, each.size) for each in (axes["tp",], axes["sp",], axes["ep",])
        )
        self._experts: list[ExpertsModule] = []
        self._spread = SpreadExperts()
        self._entries_seen: list[dict[str, int]] = []
        self._lists: list[str] = []
        self._lengths: list[Lengths] = []
        self._mixers = Mixers()
        self._outline: nn.Module | None = None
        self._example: Any = None
        self._gathering: dict[tuple[int, ...], Axis] = {}
        self._is_on_host = False
        self._without_tables: ShardingPolicy | None = None  # of a model that reads its embedding's table elsewhere

    def place_values(self) -> Recording | None:
        """Bring the model to its device with the same values on every rank; see `place_or_hollow`.

        One on the host stays there until `take_from_host`: checks run it.

        Returns:
            How a lazy model's values are made; ``None`` for others.

        Raises:
            ConfigError: If ranks built different models, or parameters overlap in memory.

        Collective: every rank of the world.
        """
        model, optimizers, context = self._model, self._objects.optimizers, self._context
        check_distinct_memory(model)
        if not is_lazy(model) and shards_from_host(context):
            self._is_on_host = True
            return None
        return place_or_hollow(model, optimizers, context)

    def take_from_host(self) -> Recording | None:
        """Take the values of the parameters out of a model that was left on the host.

        Returns:
            Where they are; ``None`` for other models.

        Collective: every rank of the world.
        """
        if not self._is_on_host:
            return None
        self._is_on_host = False
        unchanged = replace(self._context.precision, param_dtype=None)
        return hollow_objects(self._model, self._objects.optimizers, self._context.device, unchanged)

    def check(self) -> dict[str, str]:
        """Check that the model's layers and its optimizer can be split as asked.

        Returns:
            The layers whose policy could not be checked, with the reasons; none but with ``unchecked="allow"``.

        Raises:
            ConfigError: If an optimizer needs whole matrices and experts are spread, or keeps state that can't be cut
                and layers are, the policy changes what a layer computes or its gradients, that could not be found out,
                or experts can't be spread.

        Collective: every rank of the world.
        """
        size, ep_size = self._config.tensor.size, self._config.expert.size
        for optimizer in self._objects.optimizers:
            check_elementwise(optimizer, ep_size)
            check_state(optimizer, size)
        if ep_size > 1:
            self._find_experts(ep_size)
        if size == 1:
            return {}
        from booster_hybrid.sequence_parallel.split_gather import split_layers

        is_gathered = self._config.sequence.mode == "split_gather"
        lengths = Lengths()
        with raised_on_all("boost", self._context.device), without_stacked_adapters(self._model):
            check = functools.partial(
                check_policy,
                self._model,
                size=size,
                device=self._context.device,
                batch=self._example_batch,
                split_sequence=split_layers if is_gathered else None,
                lengths=lengths,
            )
            try:
                unchecked = check(self._policy())
            except ReadOutsideError as error:
                given = given_policy(self._model, self._options.custom_policy, self._context.hooks)
                if error.policy is None or given is not None:
                    raise
                self._without_tables = error.policy
                unchecked = check(self._policy())
            if unchecked and self._options.unchecked == "raise":
                raise _not_checked(self._model, unchecked)
        if is_gathered:
            self._note_lengths([lengths])
        return unchecked

    def _note_lengths(self, lengths: list[Lengths]) -> None:
        """Note for which lengths layers were compared, alike on all ranks: what one has seen depends on its batch."""
        lengths = self._context.coordinator.broadcast_object(lengths, name="boost", meets=False)
        self._mixers = next((each.mixers for each in lengths), Mixers())
        self._lengths = [] if self._options.unchecked == "allow" else lengths

    def _find_experts(self, size: int) -> None:
        with raised_on_all("boost", self._context.device):
            rules = expert_rules(self._model, self._options.custom_policy, self._context.hooks)
            self._experts = find_experts(self._model, rules, size)
            if not is_evenly_routed():
                check_experts(self._experts, self._context.device)

    def plan_stages(self) -> StagePlan | None:
        """Find the model's layers and how it is cut into stages, by a dry run on the first rank.

        The dry run needs the whole model, and communicates nothing. Every rank reads the batch for it, so that data
        sets that draw random numbers of their own, or read on, are alike everywhere afterwards.

        Returns:
            ``None`` without a pipeline.

        Raises:
            ConfigError: If the model can't be cut, or its layers are not found.

        Collective: every rank of the world.
        """
        config, sequence, model = self._config.pipeline, self._config.sequence, self._model
        if config.size == 1 and sequence.mode is None:
            return None
        if config.size > 1:
            _refuse_compiled(model)
        self._lists = self._known_lists(is_pipeline=config.size > 1)
        if config.size == 1 and self._lists:
            return None
        found: Any = None
        seen: list[dict[str, int]] = []
        with raised_on_all("boost", self._context.device):
            try:
                batch = self._example_batch()
                if self._options.split_batch is None:
                    seen = [*check_entries(self._objects.dataloader), lengths_of(batch)]
                if config.size > 1:
                    self._outline, self._example = outline_of(model, self._context.device), batch
                if self._context.coordinator.rank == 0:
                    found = self._run_dry(batch)
            except (BoosterError, TypeError):
                raise
            except Exception as error:
                raise dry_run_failed(model, error) from error
        self._lists, found = self._context.coordinator.broadcast_object(found, name="boost", meets=False)
        self._entries_seen = seen
        return None if found is None else StagePlan.of(model, found, config)

    def check_sequences(self) -> None:
        """Check that sequences can be split between the layers, on a batch of the data loader or a dummy.

        Raises:
            ConfigError: If not, or if that could not be found out.

        Collective: every rank of the world.
        """
        config = self._config.sequence
        if config.mode in (None, "split_gather"):
            return
        from booster_hybrid.probe.sequences import NotComparedError, check_sequences

        device, lists = self._context.device, self._lists_to_split()
        with raised_on_all("boost", device):
            batches, lengths = self._batches(), []
            try:
                sizes = config.size, self._config.tensor.size
                lengths = check_sequences(self._model, lists, str(config.mode), sizes, device, batches)
            except NotComparedError as error:
                if self._options.unchecked == "raise":
                    msg = (
                        f"It could not be checked whether {type(self._model).__name__} computes the same from parts of "
                        f"sequences (`sequence_parallelism_mode={config.mode!r}`): {error}. Pass the data loader to "
                        "`boost`, or `HybridParallelPlugin(example_batch=...)` with a batch that the model takes; "
                        "`unchecked='allow'` trusts the model instead."
                    )
                    raise ConfigError(msg) from error
        self._note_lengths(lengths)
        if self._mixers.classes and self._context.coordinator.rank == 0:
            logging.getLogger("booster").warning(
                "%s: %s mix positions of a sequence outside of attention. They run on whole sequences on each of %d "
                "ranks, with the memory and the time of these.",
                type(self._model).__name__,
                ", ".join(sorted(self._mixers.classes)),
                config.size,
            )

    def _batches(self) -> list[Any]:
        """Return batches that the model may take: the user's, and the model's own dummy."""
        from booster_hybrid.probe.batches import with_choices

        found = []
        with contextlib.suppress(Exception):  # whatever a data set raises, training tells of it
            found.append(batch_at_hand(self._objects.dataloader, self._options.example_batch))
        with contextlib.suppress(ConfigError):
            found += with_choices(example_batch(self._model, None))
        place = torch.device("cpu") if self._is_on_host else self._context.device
        return [move_batch(each, place) for each in found if each is not None]

    def split_layers(self) -> TensorParallelModel:
        """Spread experts over their ranks, split the layers over the tensor parallel ranks, and sequences over theirs.

        Raises:
            ConfigError: If the model has no policy, or sizes that can't be split.
        """
        split = TensorParallelModel()
        if self._experts:
            # Before layers are split, so that tokens travel once and partial sums over tensor parallel ranks come last.
            self._spread = spread_experts(self._model, self._experts, self._expert_group)
            self._cut_state(self._spread.splits)
        if self._config.tensor.size > 1:
            parallel_output = self._options.parallel_output
            split = parallelize(self._model, self._policy(), self._tensor_group, parallel_output=parallel_output)
            if split.streams is not None and self._config.pipeline.size > 1:
                split.streams.draw_alike()
            self._cut_state(split.splits)
        if self._config.sequence.mode is not None:
            self._split_sequences(split)
        return split

    def _cut_state(self, splits: Mapping[str, Split]) -> None:
        for optimizer in self._objects.optimizers:
            cut_state(self._model, optimizer, splits)

    def local_model(self, split: TensorParallelModel, plan: StagePlan | None) -> LocalModel:
        """Return which part of the model this rank holds.

        Args:
            split: Which part of each parameter.
            plan: Which layers; ``None`` for all.

        Collective: every rank of the world.
        """
        local = LocalModel(
            tensor_group=self._tensor_group,
            expert_group=self._expert_group,
            splits=split.splits,
            expert_splits=self._spread.splits,
        )
        if plan is None:
            return local
        stage = self._axes["pp",].index
        groups = {}
        for holders in plan.stages.shared():
            group = new_groups([[ranks[holder] for holder in holders] for ranks in self._shape.groups(("pp",))])
            if group is not None:
                groups[holders] = group
        return replace(
            local,
            stage=stage,
            pipeline=self._axes["pp",].group,
            is_owner=lambda name: plan.stages.owner(name) == stage,
            copy_groups=groups,
        )

    def cut(self, plan: StagePlan) -> CutModel:
        """Cut the model into stages, of which this rank keeps its own.

        Args:
            plan: How it is cut.
        """
        copies = plan.copies(self._model)
        # Layers' forwards that split their backward are called by those that stages put around layers.
        split_backward = SplitBackward(self._model) if self._config.pipeline.style == ZERO_BUBBLE else None
        plan.checkpoint(self._model, self._config.pipeline.checkpoint_ratios)
        # Parameters of other stages still tell their format: models make tables in that of their embedding.
        dtypes = working_dtypes(self._model, self._context.precision)
        config = self._config
        communicates = config.tensor.size > 1 or config.sequence.mode is not None or bool(self._experts)
        staged = plan.cut(self._model, self._axes["pp",].index, dtypes, has_collectives=communicates)
        for optimizer in self._objects.optimizers:
            leave_out(self._model, optimizer)
        return CutModel(staged, split_backward, copies)

    def engine(self, model: HybridModel, plan: StagePlan, cut: CutModel) -> PipelineEngine:
        """Return what takes batches through the pipeline.

        Args:
            model: The boosted model.
            plan: How it is cut.
            cut: Its stages.

        Collective: every rank of the world.
        """
        pipeline, device = self._axes["pp",], self._context.device
        cut.staged.forward = model.run_stage
        channels = make_channels(self._shape.groups(("pp",)))
        forms = CutsByForm(
            cut.staged.model,
            self._outline,
            self._paths(self._lists),
            plan.cuts,
            self._example,
            self._config.pipeline,
            trains=bool(self._objects.optimizers),
        )
        link = Link(plan.cuts.sent_names, pipeline.ranks, pipeline.index, channels, device)
        link.connect()
        engine = PipelineEngine(
            cut.staged,
            self._config.pipeline,
            pipeline.index,
            link,
            SampleEntries(cut.staged.model, self._entries_seen),
            forms,
            replica=self._axes["pp", "sp", "tp"],
            data=self._axes["dp",],
            sharing=[self._axes[name,] for name in ("tp", "sp", "ep")],
            coordinator=self._context.coordinator,
            device=device,
            exchanges_tokens=bool(self._experts),
            draws_on_host=plan.cuts.draws_on_host,
            split_hook=self._options.split_batch,
            run_options={"split": cut.split_backward, "record": self._record()},
        )
        if model.gatherer is not None:
            engine.gathered, engine.written = model.gathered, model.gatherer.take_changes
        return engine

    def make_gathering(self) -> None:
        """Make the groups in which sharded parameters are gathered.

        Collective: every rank of the world.
        """
        split = with_experts(self._shape, self._config.expert.size)
        made = make_axes(split, [("edp", "ep", "sp"), ("edp", "sp")])
        self._gathering = {axis.ranks: axis for axis in made.values()}

    def sharding_ranks(self) -> ShardingRanks:
        """Return who shares the optimizer's state: the data parallel ranks; none do where each has all of it."""
        return self._sharing(self._axes["dp", "sp"], 1)

    def expert_ranks(self) -> dict[int, ShardingRanks]:
        """Return who shares the state of experts that are spread, by ``id``: the ranks that have the same ones."""
        ranks = self._sharing(self._axes["edp", "sp"], self._config.expert.size)
        return dict.fromkeys(self._spread.held, ranks)

    def _sharing(self, alike: Axis, num_shares: int) -> ShardingRanks:
        data = self._axes["dp", "sp"]
        gathering = self._gathering[alike.ranks].group if self._gathering else None
        if self._config.zero is None:
            return ShardingRanks(
                shard_group=self._axes[()].group,
                shard_rank=0,
                shard_size=1,
                replica_group=alike.group if alike.size > 1 else None,
                replica_rank=alike.index,
                holders=data.group,
                num_shares=num_shares,
            )
        return ShardingRanks(
            shard_group=alike.group,
            shard_rank=alike.index,
            shard_size=alike.size,
            holders=data.group,
            num_shares=num_shares,
            gather_group=gathering,
        )

    def _policy(self) -> ShardingPolicy:
        if self._without_tables is not None:
            return self._without_tables
        return policy_for(self._model, self._options.custom_policy, self._context.hooks)

    def _example_batch(self) -> Any:
        batch = example_batch(self._model, self._objects.dataloader, self._options.example_batch)
        return move_batch(batch, torch.device("cpu") if self._is_on_host else self._context.device)

    def _known_lists(self, *, is_pipeline: bool) -> list[str]:
        """Return the lists of layers that a policy names; none where a dry run has to find them."""
        known = known_layers(self._model, self._options.custom_policy, self._context.hooks)
        if known is None:
            inner = inner_model(self._model)
            reads_more = language_model(inner) is not None  # whose towers are lists of layers as well
            if reads_more or (not is_pipeline and self._options.example_batch is None):
                return [*layer_lists(inner)] if getattr(inner, "_tp_plan", None) else []
        return [] if known is None else [*known.layers]

    def _paths(self, lists: Sequence[str]) -> list[str]:
        """Return where lists are in the model, given their names, in which adapters around it don't show."""
        paths = {name: path for name, path, _ in named_modules(self._model)}
        return [paths.get(name, name) for name in lists]

    def _run_dry(self, batch: Any) -> Any:
        """Return the lists of layers, and how the model may be cut there."""
        model, config = self._model, self._config.pipeline
        is_pipeline = config.size > 1
        num_stages = make_schedule(config.style, config.size, 1, config.num_chunks).placement.num_stages
        with kept_generators():
            if self._lists:
                lists = self._paths(self._lists)
            else:
                lists = find_layers(model, batch, num_stages if is_pipeline else 0)
            names = {path: name for name, path, _ in named_modules(model)}
            found = [names.get(path, path) for path in lists]
            if not is_pipeline:
                return found, None
            return found, find_cuts(model, lists, batch, config, trains=bool(self._objects.optimizers))

    def _split_sequences(self, split: TensorParallelModel) -> None:
        from booster_hybrid.sequence_parallel.apply import split_sequences
        from booster_hybrid.sequence_parallel.split_gather import split_between_blocks

        model, lists = inner_model(self._model), self._lists_to_split()
        mode = str(self._config.sequence.mode)
        if mode == "split_gather":
            known = next((each for each in self._lengths if each.compared), None)
            left_whole = set() if known is None else known.left_whole
            split_between_blocks(
                model, [name for name in lists if name not in left_whole], self._tensor_group, split, known
            )
            return
        split_sequences(
            model,
            lists,
            mode,
            self._sequence_group,
            rings=self._rings,
            parallel_output=self._options.parallel_output,
            lengths=self._lengths,
            mixers=self._mixers,
        )

    def _lists_to_split(self) -> list[str]:
        known = known_layers(self._model, self._options.custom_policy, self._context.hooks)
        return [name for name in self._lists if known is None or name not in known.whole_sequences]

    @property
    def _rings(self) -> list[RankGroup] | None:
        """The two rings of ring attention, the outer one first; ``None`` where there is one."""
        if self._config.sequence.inner_ring_size is None:
            return None
        axes = [self._axes[name] for name in OF_RINGS]
        return [RankGroup(each.group, each.index, each.size) for each in axes]

    def _record(self) -> PipelineRecord | None:
        folder, pipeline = self._options.pipeline_record, self._axes["pp",]
        if folder is None:
            return None
        rank = self._context.coordinator.rank
        return PipelineRecord(folder, rank, pipeline.index, min(pipeline.ranks), self._context.device)


def _refuse_compiled(model: nn.Module) -> None:
    """Raise if a model was compiled as a whole: stages run its code outside of the layers as Python."""
    dynamo = sys.modules.get("torch._dynamo")  # what is not imported has compiled nothing
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if is_wrapped or getattr(model, "_compiled_call_impl", None) is not None:  # where `Module.compile` leaves it
        msg = (
            "A model that `torch.compile` has compiled as a whole can't be cut into pipeline stages. Compile its "
            "layers instead, for example `for layer in model.model.layers: layer.compile()`, or use `pp_size=1`."
        )
        raise ConfigError(msg)


def _not_checked(model: nn.Module, unchecked: Mapping[str, str]) -> ConfigError:
    """Return the error of layers of which it could not be found out whether they are right when they are split."""
    name, reason = next(iter(unchecked.items()))
    more = f" ({len(unchecked) - 1} more are like it)" if len(unchecked) > 1 else ""
    msg = (
        f"It could not be checked whether '{name}' of {type(model).__name__} computes the same when `tp_size` splits it"
        f"{more}: {reason}. Pass the data loader to `boost`, or `HybridParallelPlugin(example_batch=...)` with a batch "
        "that the model's forward takes and that reaches every layer; `unchecked='allow'` trusts the policy instead."
    )
    return ConfigError(msg)
