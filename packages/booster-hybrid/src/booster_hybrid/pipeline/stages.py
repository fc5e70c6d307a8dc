"""Which rank of a pipeline holds which layers, parameters and buffers; several ranks may hold one.

All of it follows from the dry run, so that every rank knows it of every other.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.state import NamedTensors
from booster_hybrid.fixed_draws import host_states
from booster_hybrid.pipeline.cut import Cuts, StagedModel, held_modules, idle_modules, share_layers
from booster_hybrid.pipeline.needs import find_needs
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.trace import copy_of
from booster_runtime.activations import enable_activation_checkpointing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from booster_hybrid.config import PipelineConfig
    from booster_hybrid.pipeline.cut import StageRange
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


def find_cuts(model: nn.Module, lists: Sequence[str], batch: Any, config: PipelineConfig, *, trains: bool) -> Cuts:
    """Return where a model may be cut, and what its stages need, by dry runs.

    Args:
        model: The user's model, whole.
        lists: Names of its lists of layers.
        batch: As its data loader yields it.
        config: How many stages there are.
        trains: Whether the model will be trained.

    Raises:
        ConfigError: If the model can't be cut.
    """
    num_stages = make_schedule(config.style, config.size, 1, config.num_chunks).placement.num_stages
    own, before = _copy_of(model) or model, host_states()
    trace, needs = find_needs(own, lists, batch, num_stages, config.num_layers_per_stage, trains=trains)
    names = [layer.name for layer in trace.layers]
    found = {True: needs, False: needs}
    other = _copy_of(model)
    # A mode that fails on the batch, or can't be cut, is taken to be as the one that the model is in.
    with contextlib.suppress(Exception):
        if other is not None:
            for module in other.modules():
                module.training = not model.training  # some models' `train` changes parameters, which are shared
            seen, needs = find_needs(other, lists, batch, num_stages, config.num_layers_per_stage, trains=trains)
            if [layer.name for layer in seen.layers] == names:
                found[not model.training] = needs
    ranges = share_layers(len(names), num_stages, config.num_layers_per_stage)
    draws_on_host = host_states() != before
    return Cuts(trace, found, idle_modules(dict(model.named_modules()), trace, ranges), draws_on_host)


def _copy_of(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model that shares its parameters; ``None`` if it can't be copied."""
    with contextlib.suppress(Exception):  # whatever an attribute raises that can't be copied
        return copy_of(model)
    return None


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
