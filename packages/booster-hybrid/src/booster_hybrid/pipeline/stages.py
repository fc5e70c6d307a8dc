"""Which rank of a pipeline holds which layers, parameters and buffers; several ranks may hold one.

All of it follows from the dry run, so that every rank knows it of every other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors
from booster_hybrid.pipeline.cut import Cuts, StagedModel, held_modules, share_layers
from booster_hybrid.pipeline.flow import Crossing
from booster_hybrid.pipeline.host_draws import HostDraws
from booster_hybrid.pipeline.recording import copy_in_mode, record, record_other, sample_dims
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.trace import trace_flow
from booster_hybrid.pipeline.values import add_values
from booster_hybrid.pipeline.writes import check_writes
from booster_hybrid.skipped_layers import check_no_layer_is_skipped
from booster_runtime.activations import enable_activation_checkpointing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from booster_hybrid.config import PipelineConfig
    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.flow import Flow, Needs
    from booster_hybrid.pipeline.recording import Recording
    from booster_hybrid.pipeline.schedule import Placement
    from booster_hybrid.pipeline.trace import Trace


@dataclass(frozen=True)
class StageMap:
    """Which ranks of a pipeline hold a model's tensors.

    Args:
        ranges: The layers of each stage.
        holders: For each parameter and persistent buffer, by its first name: the positions in the pipeline that need
            it, in ascending order. A buffer is everywhere, and is true where its module is needed.
        aliases: For each further name of a tied tensor, its first name, in the whole model.
        paths: For each name, the path to the tensor in the whole model.
        parameter_names: First names of the parameters.
    """

    ranges: tuple[StageRange, ...]
    holders: Mapping[str, tuple[int, ...]] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)
    paths: Mapping[str, str] = field(repr=False)
    parameter_names: frozenset[str] = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, trace: Trace, placement: Placement, asked: Sequence[int] | None) -> StageMap:
        """Return which ranks will hold the tensors of a model.

        Args:
            model: The user's model, whole.
            trace: What a dry run of it has seen.
            placement: Which rank has which stages.
            asked: Number of layers of each stage; ``None`` shares them out.

        Raises:
            ConfigError: If the layers can't be shared out so.
        """
        ranges = share_layers(len(trace.layers), placement.num_stages, asked)
        modules = dict(model.named_modules())
        named = NamedTensors.of(model)
        found: dict[str, set[int]] = {name: set() for name in named.tensors}
        for rank in range(placement.num_ranks):
            for name in held_modules(modules, trace, [ranges[stage] for stage in placement.stages_of(rank)]):
                module = modules[name]
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    first = named.name_of.get(id(tensor))  # buffers that are not persistent have no name
                    if first is not None:
                        found[first].add(rank)
        return cls(
            tuple(ranges),
            {name: tuple(sorted(ranks)) for name, ranks in found.items()},
            named.aliases,
            named.paths,
            frozenset(name for name, tensor in named.tensors.items() if isinstance(tensor, nn.Parameter)),
        )

    @property
    def parameters(self) -> frozenset[str]:
        """All names of parameters."""
        return self.parameter_names | {name for name, first in self.aliases.items() if first in self.parameter_names}

    def name_at(self, path: str) -> str:
        """Return the first name of the tensor at a path."""
        name = next(name for name, each in self.paths.items() if each == path)
        return self.aliases.get(name, name)

    def owner(self, name: str) -> int:
        """Return the first position that holds a tensor; the first of all where no module needs it."""
        holders = self.holders.get(self.aliases.get(name, name), ())
        return holders[0] if holders else 0

    def shared(self) -> list[tuple[int, ...]]:
        """Return the sets of positions that hold a tensor each, of those with more than one, in a fixed order."""
        return sorted({holders for holders in self.holders.values() if len(holders) > 1})


def find_cuts(
    model: nn.Module,
    lists: Sequence[str],
    batch: Any,
    config: PipelineConfig,
    *,
    trains: bool,
    held_as: Trace | None = None,
) -> Cuts:
    """Return where a model may be cut, and what its stages need, by dry runs.

    Args:
        model: The user's model, whole.
        lists: Names of its lists of layers.
        batch: As its data loader yields it.
        config: How many stages there are.
        trains: Whether the model will be trained.
        held_as: What a dry run on another batch has seen, by which stages hold parameters; ``None`` for what this one
            sees. With it, the mode that the model is in is the only one that is looked at.

    Raises:
        ConfigError: If the model can't be cut, or not as it is for the other batch.
    """
    watched = HostDraws(model)
    with watched:
        trace, flow = trace_flow(model, lists, batch)
    watched.check_own({layer.name for layer in trace.layers})
    if held_as is not None:
        _check_same_layers(model, trace, held_as)
    if trains:
        check_no_layer_is_skipped(model, trace, lambda draws: trace_flow(model, lists, batch, draws)[0])
    with watched:
        needs = _Search(model, trace, config, batch, held_as or trace, trains=trains)
        found = needs.in_both_modes(flow) if held_as is None else {model.training: needs.as_it_is(flow)}
    return Cuts(trace, found, draws_on_host=watched.were_seen)


def _check_same_layers(model: nn.Module, trace: Trace, before: Trace) -> None:
    """Raise if a batch takes a model through other layers than the one by which it was cut."""
    pairs = itertools.zip_longest((each.name for each in trace.layers), (each.name for each in before.layers))
    for position, (now, then) in enumerate(pairs):
        if now != then:
            msg = (
                f"{type(model).__name__} calls {'no layer' if now is None else repr(now)} as its layer number "
                f"{position} for a batch of this form, and {'none' if then is None else repr(then)} for the example at "
                "`boost`, by which it was cut into stages. Pass an `example_batch` like the batches that are run, or "
                "use `pp_size=1`."
            )
            raise ConfigError(msg)


class _Search:
    """Finds what stages get and leave out.

    Args:
        model: The user's model, whole.
        trace: What a dry run of it has seen.
        config: How many stages there are.
        batch: What the dry run was given.
        held_as: By which stages hold parameters.
        trains: Whether the model will be trained.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, config: PipelineConfig, batch: Any, held_as: Trace, *, trains: bool
    ) -> None:
        self._model, self._trace, self._batch, self._trains = model, trace, batch, trains
        num_stages = make_schedule(config.style, config.size, 1, config.num_chunks).placement.num_stages
        self._ranges = share_layers(len(trace.layers), num_stages, config.num_layers_per_stage)
        modules = dict(model.named_modules())
        self._ids = {name: id(parameter) for name, parameter in model.named_parameters()}
        self._held = [
            {
                id(each)
                for name in held_modules(modules, held_as, [stage])
                for each in modules[name].parameters(recurse=False)
            }
            for stage in self._ranges
        ]
        self._what = type(model).__name__

    def as_it_is(self, flow: Flow) -> Needs:
        """Return what stages need in the mode that the model is in.

        Args:
            flow: The graph of its dry run.

        Raises:
            ConfigError: If a stage needs what is not or can't be sent to it, or writes in place to what it receives or
                lacks.
        """
        needs, recordings = self._by_graph(flow)
        self._check(needs, recordings)
        return needs

    def in_both_modes(self, flow: Flow) -> dict[bool, Needs]:
        """Return what stages need in training (``True``) and in evaluation.

        A mode that the model is not in, and that fails on the batch or can't be cut, is taken to be as the other one.

        Args:
            flow: The graph of the model's dry run.

        Raises:
            ConfigError: As for `as_it_is`.
        """
        model, trace, batch = self._model, self._trace, self._batch
        known, recordings = self._by_graph(flow)
        # What the graph shows is of one mode; values alone tell of the other.
        of_layers = [Crossing(() if stage.is_first else trace.layers[stage.first].carried) for stage in self._ranges]
        found = {True: known, False: known}
        recorded = {recordings[-1].is_training: recordings}
        for mode in {True, False} - recorded.keys():
            other = copy_in_mode(model, is_training=mode)
            if other is None:
                continue
            record_mode = functools.partial(record_other, other, trace, batch=batch)
            if mode is not model.training:  # else some of its modules are in the other mode
                with contextlib.suppress(ConfigError):
                    needs, recorded[mode] = self._by_values(of_layers, record_mode)
                    found[mode] = replace(needs, sample_dims=sample_dims(other, batch, recorded[mode][-1].shapes))
            if mode not in recorded:
                recorded[mode] = record_mode(recordings[-1].senders)
        for mode in (True, False):  # stages that train are refused first
            self._check(found[mode], recorded.get(mode, ()))
        return found

    def _is_held(self, stage: int, name: str) -> bool:
        return self._ids[name] in self._held[stage]

    def _by_graph(self, flow: Flow) -> tuple[Needs, list[Recording]]:
        of_graph = flow.crossings([(stage.first, stage.last) for stage in self._ranges], self._is_held, self._what)
        record_it = functools.partial(record, self._model, self._trace, batch=self._batch)
        needs, recordings = self._by_values(of_graph, record_it)
        dims = sample_dims(self._model, self._batch, recordings[-1].shapes)
        return replace(needs, sample_dims=dims), recordings

    def _by_values(
        self, crossings: Sequence[Crossing], record_it: Callable[[frozenset[str]], list[Recording]]
    ) -> tuple[Needs, list[Recording]]:
        return add_values(self._what, self._trace, self._ranges, crossings, self._is_held, record_it)

    def _check(self, needs: Needs, recordings: Sequence[Recording]) -> None:
        for recording in recordings:
            check_writes(self._what, self._trace, self._ranges, needs, self._is_held, recording, trains=self._trains)


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut; made of the whole model, carried out when its layers have been split.

    Args:
        cuts: Where it may be.
        placement: Which rank has which stages.
        stages: Which rank holds which tensors.
    """

    cuts: Cuts
    placement: Placement
    stages: StageMap

    @classmethod
    def of(cls, model: nn.Module, cuts: Cuts, config: PipelineConfig) -> StagePlan:
        """Return how a model is cut.

        Args:
            model: The user's model, whole.
            cuts: Where it may be.
            config: How many stages there are, and on which ranks.

        Raises:
            ConfigError: If the layers can't be shared out so.
        """
        placement = make_schedule(config.style, config.size, 1, config.num_chunks).placement
        stages = StageMap.of(model, cuts.trace, placement, config.num_layers_per_stage)
        return cls(cuts, placement, stages)

    def copies(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """Return for each parameter that several ranks hold, by ``id``, which ones they are."""
        name_of = NamedTensors.of(model).name_of
        held = {id(parameter): self.stages.holders[name_of[id(parameter)]] for parameter in model.parameters()}
        return {key: ranks for key, ranks in held.items() if len(ranks) > 1}

    def checkpoint(self, model: nn.Module, ratios: Sequence[float]) -> None:
        """Let the first layers of each stage keep only their inputs for backward; on every rank those of all stages.

        Args:
            model: The user's model, whole or with its layers split.
            ratios: For each stage, the part of its layers, rounded up.

        Raises:
            ConfigError: If the model does so by itself already.
        """
        modules = dict(model.named_modules())
        chosen = [
            modules[layer.name]
            for stage, ratio in zip(self.stages.ranges, ratios, strict=True)
            for layer in self.cuts.trace.layers[
                stage.first : stage.first + math.ceil(ratio * (stage.last - stage.first))
            ]
        ]
        if chosen:
            enable_activation_checkpointing(model, chosen)

    def cut(
        self,
        model: nn.Module,
        index: int,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        *,
        has_collectives: bool = False,
    ) -> StagedModel:
        """Cut a model, in place; of its parameters those stay that a rank's stages need.

        Args:
            model: The user's model.
            index: The rank's position in the pipeline.
            dtype_of: Tells the format in which the run works with a parameter.
            has_collectives: Whether modules communicate in forward, so that their outputs' shapes can't be told alone.
        """
        ranges = [self.stages.ranges[stage] for stage in self.placement.stages_of(index)]
        return StagedModel(model, self.cuts, ranges, dtype_of, has_collectives=has_collectives)
