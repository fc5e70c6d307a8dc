"""`shard`: split a model's layers, cut it into stages, and share out what its optimizer updates, from top to bottom.

What one axis alone needs is imported where a mesh has that axis.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from booster_core.errors import BoosterError, ConfigError
from booster_core.state import named_modules
from booster_hybrid.model import HybridModel
from booster_hybrid.modules import inner_model
from booster_hybrid.optimizer import HybridEngine, HybridOptimizer, check_experts, check_state, cut_state, leave_out
from booster_hybrid.pipeline.batches import (
    batch_at_hand,
    check_entries,
    dry_run_failed,
    example_batch,
)
from booster_hybrid.pipeline.engine import PipelineEngine
from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_hybrid.pipeline.runtime import PipelineRecord
from booster_hybrid.pipeline.schedule import ZERO_BUBBLE, make_schedule
from booster_hybrid.pipeline.stages import StagePlan, find_cuts
from booster_hybrid.pipeline.trace import find_layers
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.find import expert_rules, given_policy, known_layers, language_model, layer_lists, policy_for
from booster_hybrid.probe.probe import CheckedPolicy, ReadOutsideError, check_policy
from booster_hybrid.random_streams import preserve_generators
from booster_hybrid.same_training import RequiresGradCheck, check_copies
from booster_hybrid.sequence_parallel.stack import Mixers
from booster_hybrid.state import LocalModel
from booster_hybrid.tensor_parallel.adapters import without_stacked_adapters
from booster_hybrid.tensor_parallel.plan import TensorParallelModel, parallelize
from booster_hybrid.weight_reads import DirectWeightUses, parts_of
from booster_runtime.collectives import new_groups
from booster_runtime.compiling import compile_apart
from booster_runtime.data import move_batch
from booster_runtime.lazy import hollow_objects, is_lazy, place_or_hollow, shards_from_host
from booster_runtime.model_methods import mark_as_local
from booster_runtime.sharding import ShardingRanks, check_distinct_memory, raised_on_all, working_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from booster_core.plugin import BoostContext, Boosted, OptimizerWrapper
    from booster_hybrid.config import HybridConfig
    from booster_hybrid.expert_parallel.apply import ExpertsModule
    from booster_hybrid.mesh import Axis, Mesh
    from booster_hybrid.plugin import HybridParallelPlugin
    from booster_hybrid.policy.base import ShardingPolicy
    from booster_hybrid.sequence_parallel.stack import Argument
    from booster_hybrid.tensor_parallel.split import Split
    from booster_runtime.lazy import Recording
    from booster_zero import LowLevelZeroPlugin

_PARAMETERS = 3
"""The stage of ZeRO that shards parameters."""


class Sharded(NamedTuple):
    """A model that was split.

    Args:
        boosted: The objects.
        recording: How the model's values are made, which it has not yet; ``None`` where it has them.
        unchecked: The layers whose policy could not be checked, with the reasons; none but with ``unchecked="allow"``.
    """

    boosted: Boosted
    recording: Recording | None
    unchecked: dict[str, str]


def shard(  # noqa: C901, PLR0912, PLR0915 - one order of steps, which reads from top to bottom
    objects: Boosted, context: BoostContext, options: HybridParallelPlugin, mesh: Mesh, zero: LowLevelZeroPlugin
) -> Sharded:
    """Split the model's layers, cut it into stages, and shard what the optimizer updates.

    Args:
        objects: What the user gave to `boost`.
        context: Device, precision and ranks of the run.
        options: The plugin, which has the options.
        mesh: This rank's place and groups.
        zero: What lets the data parallel ranks share the optimizer's state.

    Raises:
        ConfigError: If the model has no policy, computes something else or has other gradients when it is split, that
            could not be found out, it can't be cut, or an optimizer can't step on parts.

    Collective: every rank of the world.
    """
    model, optimizers, config = objects.model, objects.optimizers, options.config

    # The same values on every rank. A model on the host stays there until it was checked: checks run all of it.
    check_distinct_memory(model)
    is_on_host = not is_lazy(model) and shards_from_host(context)
    recording = None if is_on_host else place_or_hollow(model, optimizers, context)

    # Whether layers compute the same when they are split, before anything is.
    for optimizer in optimizers:
        check_state(optimizer, config.tp_size)
    experts = _checked_experts(model, context, options) if config.ep_size > 1 else []
    spread = {key: name for each in experts for key, name in each.spread_parameters().items()}
    for optimizer in optimizers:
        check_experts(optimizer, spread, config.ep_size)
    policy, checked = None, CheckedPolicy({})
    if config.tp_size > 1:
        policy, checked = _check_layers(
            objects, context, options, torch.device("cpu") if is_on_host else context.device
        )
    if is_on_host:
        recording = hollow_objects(model, optimizers, context.device, replace(context.precision, param_dtype=None))
    found = _find_layers(objects, context, options)
    plan = None if found.cuts is None else StagePlan.of(model, found.cuts, config.pipeline)
    known = known_layers(model, options.custom_policy, context.hooks)
    split_lists = [name for name in found.lists if known is None or name not in known.whole_sequences]
    dims: list[dict[Argument, int | None]] = []
    mixers = Mixers()
    if config.sequence.mode not in (None, "split_gather"):
        dims, mixers = _check_sequences(split_lists, objects, context, options)

    # Experts before layers, so that tokens travel once and partial sums over tensor parallel ranks come last.
    split = TensorParallelModel()
    expert_splits: Mapping[str, Split] = {}
    held: Collection[int] = ()
    if experts:
        from booster_hybrid.expert_parallel.apply import spread_experts

        expert_splits, held = spread_experts(model, experts, mesh.ranks("ep"))
        for optimizer in optimizers:
            cut_state(model, optimizer, expert_splits)
    if config.tp_size > 1:
        policy = policy or policy_for(model, options.custom_policy, context.hooks)
        split = parallelize(model, policy, mesh.ranks("tp"), parallel_output=options.parallel_output)
        if split.streams is not None and plan is not None:
            split.streams.draw_alike()
        for optimizer in optimizers:
            cut_state(model, optimizer, split.splits)
    if config.sequence.mode is not None:
        split_lists = [name for name in split_lists if name not in checked.left_whole]
        _split_sequences(model, split_lists, split, (dims, mixers), mesh, options)
    if config.tp_size > 1 or config.sequence.mode is not None:
        compile_apart(model)

    # What of it this rank holds.
    local = LocalModel(
        tensor_group=mesh.ranks("tp"),
        expert_group=mesh.ranks("ep"),
        splits=split.splits,
        expert_splits=expert_splits,
        **({} if plan is None else _stage_of(plan, mesh)),
    )
    copies, make_engine = {}, None
    if plan is not None:
        copies = plan.copies(model)
        make_engine = _cut(plan, objects, context, options, mesh, has_experts=bool(experts))
    replica, callers = mesh["pp", "sp", "tp"], mesh["ep", "pp", "sp", "tp"]
    shards_parameters = config.zero is not None and config.zero.stage == _PARAMETERS
    if shards_parameters:  # a forward gathers over the data parallel ranks, too
        callers = replace(callers, ranks=tuple(range(context.coordinator.world_size)))
    parts = parts_of(model, local) if optimizers and options.unchecked == "raise" else {}
    reads = DirectWeightUses(model, parts) if parts else None

    # The optimizer's state, and in stage 3 the parameters, over the data parallel ranks.
    model_class = functools.partial(
        HybridModel,
        local=local,
        replica=replica,
        callers=callers,
        streams=split.streams,
        trained_alike=RequiresGradCheck(model, replica, context.device) if replica.size > 1 and plan is None else None,
        outside_reads=reads,
        stages=None if plan is None else plan.stages,
        make_engine=make_engine,
    )
    # Tokens travel in backward between ranks that may have come less far in their buckets.
    waits = False if experts else shards_parameters or None
    engine_class = functools.partial(HybridEngine, local=local, waits_in_backward=waits)
    optimizer_class = functools.partial(HybridOptimizer, outside_reads=reads)
    gathering = mesh.gathering_groups(config.ep_size) if shards_parameters else {}
    sharing = _sharing(mesh["dp", "sp"], 1, mesh, config, gathering)
    ranks_of = dict.fromkeys(held, _sharing(mesh["edp", "sp"], config.ep_size, mesh, config, gathering))
    if shards_parameters and config.zero is not None:
        from booster_hybrid.sharded import shard_parameters

        boosted = shard_parameters(
            objects,
            context,
            config.zero,
            sharing,
            engine_class=engine_class,
            optimizer_class=optimizer_class,
            model_class=model_class,
            copies=copies,
            ranks_of=ranks_of,
            without_values=frozenset() if recording is None else recording.name_of,
            is_pipeline=plan is not None,
        )
    else:
        boosted = zero.shard_over(
            objects,
            context,
            sharing,
            engine_class,
            optimizer_class,
            model_class,
            copies=copies,
            ranks_of=ranks_of,
        )
    if max(config.tp_size, config.pipeline.size) > 1:
        for optimizer in boosted.optimizers:
            _compare_after_first_step(optimizer, model, local, mesh)
    if config.tp_size > 1 or experts or plan is not None:
        mark_as_local(model)
    return Sharded(boosted, recording, checked.unchecked)


def _checked_experts(model: nn.Module, context: BoostContext, options: HybridParallelPlugin) -> list[ExpertsModule]:
    """Return the modules of experts that are spread."""
    from booster_hybrid.expert_parallel.apply import find_experts
    from booster_hybrid.expert_parallel.exchange import is_evenly_routed
    from booster_hybrid.probe.experts import check_experts

    with raised_on_all("boost", context.device):
        rules = expert_rules(model, options.custom_policy, context.hooks)
        experts = find_experts(model, rules, options.config.ep_size)
        if not is_evenly_routed():
            check_experts(experts, context.device)
    return experts


def _check_layers(
    objects: Boosted, context: BoostContext, options: HybridParallelPlugin, place: torch.device
) -> tuple[ShardingPolicy | None, CheckedPolicy]:
    """Check that the model's layers compute the same when they are split.

    Returns:
        The policy, where it is another one than the model's, which reads its embedding's table elsewhere; and what the
        check has found, alike on all ranks.

    Args:
        objects: As for `shard`, as the next ones.
        context: Device and ranks of the run.
        options: The plugin.
        place: Where the model is.

    Collective: every rank of the world.
    """
    model, config = objects.model, options.config
    is_gathered = config.sequence.mode == "split_gather"
    split_sequence: Any = None
    if is_gathered:
        from booster_hybrid.sequence_parallel.split_gather import split_layers as split_sequence
    check = functools.partial(
        check_policy,
        model,
        size=config.tp_size,
        device=context.device,
        batch=lambda: _example(objects, options, place),
        split_sequence=split_sequence,
    )
    policy: ShardingPolicy | None = None
    with raised_on_all("boost", context.device), without_stacked_adapters(model):
        try:
            found = check(policy_for(model, options.custom_policy, context.hooks))
        except ReadOutsideError as error:
            policy = error.policy
            if policy is None or given_policy(model, options.custom_policy, context.hooks) is not None:
                raise
            found = check(policy)
        if found.unchecked and options.unchecked == "raise":
            raise _not_checked(model, found.unchecked)
    if is_gathered:  # what one has seen depends on its batch
        left_whole = context.coordinator.broadcast_object(found.left_whole, name="boost", meets=False)
        found = found._replace(left_whole=left_whole)
    return policy, found


def _example(objects: Boosted, options: HybridParallelPlugin, place: torch.device) -> Any:
    """Return a batch that the model takes, where the model is."""
    return move_batch(example_batch(objects.model, objects.dataloader, options.example_batch), place)


class FoundLayers(NamedTuple):
    """The lists of a model's layers, and what a dry run has found out.

    Args:
        lists: Names of the lists.
        cuts: How the model may be cut there; ``None`` without a pipeline.
    """

    lists: list[str]
    cuts: Any = None


def _find_layers(objects: Boosted, context: BoostContext, options: HybridParallelPlugin) -> FoundLayers:
    """Find the model's layers and how it may be cut into stages, by a dry run on the first rank.

    The dry run needs the whole model, and communicates nothing. Every rank reads the batch for it, so that data sets
    that draw random numbers of their own, or read on, are alike everywhere afterwards.

    Collective: every rank of the world.
    """
    config, model = options.config.pipeline, objects.model
    if config.size == 1 and options.config.sequence.mode is None:
        return FoundLayers([])
    if config.size > 1:
        _refuse_compiled(model)
    lists = _known_lists(model, context, options)
    if config.size == 1 and lists:
        return FoundLayers(lists)
    found: Any = None
    with raised_on_all("boost", context.device):
        try:
            batch = _example(objects, options, context.device)
            if options.split_batch is None:
                check_entries(objects.dataloader)
            if context.coordinator.rank == 0:
                found = _run_dry(model, lists, batch, options, trains=bool(objects.optimizers))
        except (BoosterError, TypeError):
            raise
        except Exception as error:
            raise dry_run_failed(model, error) from error
    lists, cuts = context.coordinator.broadcast_object(found, name="boost", meets=False)
    return FoundLayers(lists, cuts)


def _known_lists(model: nn.Module, context: BoostContext, options: HybridParallelPlugin) -> list[str]:
    """Return the lists of layers that a policy names; none where a dry run has to find them."""
    known = known_layers(model, options.custom_policy, context.hooks)
    if known is None:
        inner = inner_model(model)
        reads_more = language_model(inner) is not None  # whose towers are lists of layers as well
        if reads_more or (options.config.pipeline.size == 1 and options.example_batch is None):
            return [*layer_lists(inner)] if getattr(inner, "_tp_plan", None) else []
    return [] if known is None else [*known.layers]


def _paths(model: nn.Module, lists: Sequence[str]) -> list[str]:
    """Return where lists are in the model, given their names, in which adapters around it don't show."""
    paths = {name: path for name, path, _ in named_modules(model)}
    return [paths.get(name, name) for name in lists]


def _run_dry(model: nn.Module, known: Sequence[str], batch: Any, options: HybridParallelPlugin, *, trains: bool) -> Any:
    """Return the lists of layers, and how the model may be cut there."""
    config = options.config.pipeline
    is_pipeline = config.size > 1
    num_stages = make_schedule(config.style, config.size, 1, config.num_chunks).placement.num_stages
    with preserve_generators():
        lists = _paths(model, known) if known else find_layers(model, batch, num_stages if is_pipeline else 0)
        names = {path: name for name, path, _ in named_modules(model)}
        found = [names.get(path, path) for path in lists]
        return found, find_cuts(model, lists, batch, config, trains=trains) if is_pipeline else None


def _check_sequences(
    lists: Sequence[str], objects: Boosted, context: BoostContext, options: HybridParallelPlugin
) -> tuple[list[dict[Argument, int | None]], Mixers]:
    """Check that sequences can be split between the layers, on a batch of the data loader or a dummy.

    Returns:
        Along which dimension what layers are given is cut, and what is in them besides attention, alike on all ranks.

    Collective: every rank of the world.
    """
    from booster_hybrid.probe.calls import with_choices
    from booster_hybrid.probe.sequences import NotComparedError, check_sequences

    model, mode, device = objects.model, str(options.config.sequence.mode), context.device
    sizes = options.config.sequence.size, options.config.tp_size
    found: tuple[list[dict[Argument, int | None]], Mixers] = [], Mixers()
    with raised_on_all("boost", device):
        batches = []
        with contextlib.suppress(Exception):  # whatever a data set raises, training tells of it
            batches.append(batch_at_hand(objects.dataloader, options.example_batch))
        with contextlib.suppress(ConfigError):
            batches += with_choices(example_batch(model, None))
        batches = [move_batch(each, device) for each in batches if each is not None]
        try:
            found = check_sequences(model, lists, mode, sizes, device, batches)
        except NotComparedError as error:
            if options.unchecked == "raise":
                msg = (
                    f"It could not be checked whether {type(model).__name__} computes the same from parts of "
                    f"sequences (`sequence_parallelism_mode={mode!r}`): {error}. Pass the data loader to `boost`, or "
                    "`HybridParallelPlugin(example_batch=...)` with a batch that the model takes; `unchecked='allow'` "
                    "trusts the model instead."
                )
                raise ConfigError(msg) from error
    # What a rank has seen depends on its batch.
    found = context.coordinator.broadcast_object(found, name="boost", meets=False)
    if found[1].classes and context.coordinator.rank == 0:
        logging.getLogger("booster").warning(
            "%s: %s mix positions of a sequence outside of attention. They run on whole sequences on each of %d "
            "ranks, with the memory and the time of these.",
            type(model).__name__,
            ", ".join(sorted(found[1].classes)),
            options.config.sequence.size,
        )
    return found


def _split_sequences(
    model: nn.Module,
    lists: Sequence[str],
    split: TensorParallelModel,
    seen: tuple[Sequence[dict[Argument, int | None]], Mixers],
    mesh: Mesh,
    options: HybridParallelPlugin,
) -> None:
    """Let layers work on this rank's positions, in place."""
    from booster_hybrid.sequence_parallel.apply import split_sequences
    from booster_hybrid.sequence_parallel.split_gather import split_between_blocks

    inner, mode = inner_model(model), str(options.config.sequence.mode)
    if mode == "split_gather":
        split_between_blocks(inner, lists, mesh.ranks("tp"), split)
        return
    split_sequences(
        inner,
        lists,
        mode,
        mesh.ranks("sp"),
        parallel_output=options.parallel_output,
        dims=seen[0],
        mixers=seen[1],
    )


def _stage_of(plan: StagePlan, mesh: Mesh) -> dict[str, Any]:
    """Return what a `LocalModel` tells of this rank's stage.

    Collective: every rank of the world.
    """
    stage = mesh["pp",].index
    groups = {}
    for holders in plan.stages.shared():
        group = new_groups([[ranks[holder] for holder in holders] for ranks in mesh.shape.groups(("pp",))])
        if group is not None:
            groups[holders] = group
    return {
        "stage": stage,
        "pipeline": mesh["pp",].group,
        "is_owner": lambda name: plan.stages.owner(name) == stage,
        "copy_groups": groups,
    }


def _cut(
    plan: StagePlan,
    objects: Boosted,
    context: BoostContext,
    options: HybridParallelPlugin,
    mesh: Mesh,
    *,
    has_experts: bool,
) -> Callable[[HybridModel], PipelineEngine]:
    """Cut the model into stages, of which this rank keeps its own.

    Returns:
        What makes the engine that takes batches through them, given the boosted model.

    Collective: every rank of the world.
    """
    model, config = objects.model, options.config
    # Layers' forwards that split their backward are called by those that stages put around layers.
    split_backward = SplitBackward(model) if config.pipeline.style == ZERO_BUBBLE else None
    plan.checkpoint(model, config.pipeline.checkpoint_ratios)
    # Parameters of other stages still tell their format: models make tables in that of their embedding.
    dtypes = working_dtypes(model, context.precision)
    communicates = config.tp_size > 1 or config.sequence.mode is not None or has_experts
    staged = plan.cut(model, mesh["pp",].index, dtypes, has_collectives=communicates)
    for optimizer in objects.optimizers:
        leave_out(model, optimizer)
    gc.collect()  # errors of the dry run keep frames, and these the parameters of other stages
    pipeline, device = mesh["pp",], context.device
    link = P2PChannel(
        plan.cuts.sent_names, pipeline.ranks, pipeline.index, make_channels(mesh.shape.groups(("pp",))), device
    )
    link.connect()
    record = None
    if options.pipeline_record is not None:
        rank = context.coordinator.rank
        record = PipelineRecord(options.pipeline_record, rank, pipeline.index, min(pipeline.ranks), device)

    def make_engine(boosted: HybridModel) -> PipelineEngine:
        staged.forward = boosted.run_stage
        return PipelineEngine(
            staged,
            config.pipeline,
            pipeline.index,
            link,
            replica=mesh["pp", "sp", "tp"],
            data=mesh["dp",],
            sharing=[mesh[name,] for name in ("tp", "sp", "ep")],
            coordinator=context.coordinator,
            device=device,
            gathered=contextlib.nullcontext if boosted.gatherer is None else boosted.gathered,
            written=(lambda: None) if boosted.gatherer is None else boosted.gatherer.take_changes,
            outside_reads=boosted.outside_reads,
            exchanges_tokens=has_experts,
            draws_on_host=plan.cuts.draws_on_host,
            split_hook=options.split_batch,
            run_options={"split": split_backward, "record": record},
        )

    return make_engine


def _sharing(
    alike: Axis, num_shares: int, mesh: Mesh, config: HybridConfig, gathering: Mapping[tuple[int, ...], ProcessGroup]
) -> ShardingRanks:
    """Return who shares the optimizer's state of what some ranks have alike; none do where each has all of it.

    Args:
        alike: The ranks.
        num_shares: Number of ranks over which the rest of it is spread.
        mesh: This rank's place.
        config: The options of the mesh.
        gathering: Groups in which sharded parameters are gathered, by their ranks; none where none are.
    """
    data = mesh["dp", "sp"]
    if config.zero is None:
        return ShardingRanks(
            shard_group=mesh[()].group,
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
        gather_group=gathering.get(alike.ranks),
    )


def _compare_after_first_step(optimizer: Any, model: nn.Module, local: LocalModel, mesh: Mesh) -> None:
    """Compare what ranks hold alike once, after the first step that was taken."""

    def compare(stepped: OptimizerWrapper, metrics: Mapping[str, Any]) -> None:
        if not metrics["skipped"]:
            stepped.on_step.remove(compare)
            optimizer.engine.gatherer.wait()
            check_copies(model, local, mesh["pp", "sp", "tp"])

    optimizer.on_step.append(compare)


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
