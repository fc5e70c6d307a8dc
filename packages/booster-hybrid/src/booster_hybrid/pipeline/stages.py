"""Where a model is cut: what each stage needs from the one before, and which rank holds what; several may hold one.

All of it follows from dry runs, so that every rank knows it of every other. What stages need is found by running them
dry, one after the other, until none raises. A stage runs the model's own code with its layers and parameters alone;
what others have is absent, and a read of it raises (see `booster_hybrid.pipeline.absent`). An absent argument of a
stage's first layer is sent to it. Any other absent value that a stage reads, sends or returns names the modules whose
outputs it was computed from: these outputs are sent as well, and the stage is run again. On the stages after, what such
a module returns is replaced by what has been received, and hooks on modules inside of layers are called with it.

Layers may hand something to the model's code in ways that show in no tensor, such as a list to which they append. So
what a stage computes outside of the layers is compared with what the whole model does there, operation by operation,
and its outputs with those of the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import AbsentValueError, BoosterError, ConfigError
from booster_core.state import NamedTensors
from booster_hybrid.modules import prefixes
from booster_hybrid.pipeline.absent import (
    AbsentTensor,
    ActivationMeta,
    ModuleOutput,
    absent_like,
    is_absent,
    outputs_behind,
    read_by,
    refuse,
    take_place,
)
from booster_hybrid.pipeline.cut import (
    BoundarySpec,
    Cuts,
    StagedModel,
    StageInputs,
    held_modules,
    held_parameters,
    idle_modules,
    share_layers,
)
from booster_hybrid.pipeline.runtime import explained
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stage_forward import NotedCalls, preserve_attributes
from booster_hybrid.pipeline.trace import copy_of, run_dry, stand_ins, trace_on, with_stand_ins
from booster_hybrid.random_streams import host_states
from booster_hybrid.torch_functions import version_of
from booster_runtime.activations import enable_activation_checkpointing
from booster_runtime.data import leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    from booster_hybrid.config import PipelineConfig
    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.schedule import Placement
    from booster_hybrid.pipeline.stage_forward import ArgumentNames
    from booster_hybrid.pipeline.trace import Trace, WholeRun


def find_needs(
    model: nn.Module, lists: Sequence[str], batch: Any, num_stages: int, asked: Sequence[int] | None, *, trains: bool
) -> tuple[Trace, StageInputs]:
    """Run a model and its stages dry, in the mode that the model is in.

    Args:
        model: The whole model, or a copy of it: forwards may leave something in its attributes.
        lists: Names of its lists of layers.
        batch: As its data loader yields it.
        num_stages: Number of stages.
        asked: Number of layers of each stage; ``None`` shares them out.
        trains: Whether there will be a backward.

    Returns:
        What is seen of its layers, and what stages need.

    Raises:
        ConfigError: If a stage needs what can't be sent to it, or computes something else than the whole model.
    """
    found: list[tuple[Trace, StageInputs]] = []

    def run(make: Callable[[Tensor], Tensor], example: Any) -> None:
        tensors, options = stand_ins(model, make), {"is_fake": make is not torch.Tensor.detach, "trains": trains}
        for is_first in (True, False):
            trace, whole = trace_on(model, lists, tensors, example)
            ranges = share_layers(len(trace.layers), num_stages, asked)
            try:
                needs = _Search(model, trace, whole, ranges, tensors, example, **options).run()
            except ConfigError:
                if is_first:
                    continue  # the model may do something in its first forward alone
                raise
            found[:] = [(trace, needs)]
            return

    run_dry(model, batch, run)
    return found[0]


class _Search:
    """Finds what each stage needs, from the last one to the first.

    Args:
        model: The whole model.
        trace: What is seen of its layers.
        whole: What the whole model has computed.
        ranges: The layers of each stage.
        tensors: What stands for parameters and buffers.
        batch: What stands for the batch.
        is_fake: Whether these are fake tensors.
        trains: Whether there will be a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        whole: WholeRun,
        ranges: Sequence[StageRange],
        tensors: Mapping[str, Tensor],
        batch: Any,
        *,
        is_fake: bool,
        trains: bool,
    ) -> None:
        self._model, self._whole, self._ranges, self._trains = model, whole, ranges, trains
        self._tensors, self._batch, self._is_fake = tensors, batch, is_fake
        modules = dict(model.named_modules())
        self._held = [held_parameters(modules, trace, stage) for stage in ranges]
        self._outputs: dict[tuple[str, int], list[ModuleOutput]] = defaultdict(list)
        for output in whole.outputs:
            self._outputs[output.module, output.call].append(output)
        self._cuts = Cuts(trace, {}, idle_modules(modules, trace, ranges))
        self._first = [trace.layers[stage.first].name for stage in ranges]

    def run(self) -> StageInputs:
        """Return what stages need.

        Raises:
            ConfigError: If a stage needs what can't be sent to it, or computes something else than the whole model.
        """
        try:
            return self._needs(skips_idle=True)
        except Exception:
            # Such a module may leave something elsewhere than in what it returns.
            if not self._cuts.idle:
                raise
            return self._needs(skips_idle=False)

    def _needs(self, *, skips_idle: bool) -> StageInputs:
        boundaries = [BoundarySpec() for _ in self._ranges]
        staged = _DryStages(self._model, self._cuts, self._ranges, self._whole)
        try:
            for stage in reversed(self._ranges):
                self._complete(staged, stage, boundaries, skips_idle=skips_idle)
        finally:
            staged.restore()
        return StageInputs(tuple(boundaries), skips_idle)

    def _complete(
        self, staged: _DryStages, stage: StageRange, boundaries: list[BoundarySpec], *, skips_idle: bool
    ) -> None:
        """Run a stage until it needs nothing more than what its boundary says."""
        while True:
            needs = StageInputs(tuple(boundaries), skips_idle)
            staged.cuts = replace(self._cuts, needs={True: needs, False: needs})
            sent = boundaries[stage.index].outputs
            staged.lacks = lambda labels: not self._sendable(labels) <= {*sent}  # noqa: B023 - called in this round
            try:
                results = self._run_stage(staged, stage, sent)
                absent = {path: each for path, each in results.items() if isinstance(each, AbsentTensor)}
                missing = outputs_behind(absent.values())
                first = next(iter(absent.items()), None)
                what = f"output {first[0] or '(all)'} needs values of {first[1].origin}" if first else ""
            except AbsentValueError as error:
                what, missing = read_by(error)
            boundaries[stage.index] = BoundarySpec(staged.carried, sent)
            if not what:
                self._compare(staged, stage, results)
                return
            more = self._sendable(missing).difference(sent)
            if not more or stage.is_first:
                raise self._refused(stage, what)
            boundaries[stage.index] = BoundarySpec(staged.carried, tuple(sorted({*sent, *more})))

    def _run_stage(self, staged: _DryStages, stage: StageRange, sent: Sequence[ModuleOutput]) -> dict[str, Tensor]:
        """Return what the model returns on the last stage; nothing on others."""
        held = self._held[stage.index]
        instead = dict(self._tensors)
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in held:
                instead[name] = absent_like(ActivationMeta.of(instead[name]), f"parameter '{name}'")
        received = {} if stage.is_first else dict(self._whole.arguments[stage.first])
        received.update((output.name, self._whole.outputs[output]) for output in sent)
        received = {
            name: each.detach().requires_grad_(each.requires_grad and self._trains) for name, each in received.items()
        }
        staged.begin(stage)
        staged.forward = with_stand_ins(self._model, instead)
        with preserve_attributes(self._model), staged.activated(stage.index, received):
            try:
                outputs, _ = staged.run(self._batch)
            except AbsentValueError:
                raise
            except Exception as error:
                explanation = explained(error)
                if explanation is not error:
                    raise explanation from error
                if self._is_fake or isinstance(error, BoosterError):
                    raise
                raise self._refused(stage, f"its forward raises {type(error).__name__}: {error}") from error
        return dict(tensors_of(outputs)) if stage.is_last else {}

    def _sendable(self, labels: Iterable[ModuleOutput]) -> set[ModuleOutput]:
        """Return the outputs of the whole run that absent ones stand for."""
        found: set[ModuleOutput] = set()
        for label in labels:
            found.update([label] if label in self._whole.outputs else self._outputs.get((label.module, label.call), ()))
        return found

    def _compare(self, staged: _DryStages, stage: StageRange, results: Mapping[str, Tensor]) -> None:
        """Raise if a stage has computed something else outside of the layers than the whole model."""
        idle = staged.cuts.idle if staged.needs.skips_idle else {}
        skipped = {name for name, stages in idle.items() if stage.index in stages}
        expected, depth = [], 0
        for call in self._whole.calls:
            is_skipped = call[0] in ("begin", "end") and call[1] in skipped
            depth -= is_skipped and call[0] == "end"
            if not depth and call[0] not in ("begin", "end"):
                expected.append(call)
            depth += is_skipped and call[0] == "begin"
        if not stage.is_last:
            expected = expected[: expected.index(("layer", stage.last)) + 1]
        for now, then in itertools.zip_longest(staged.calls, expected):
            if now != then:
                what = f"the code outside of its layers calls {_shown(now)} there, and {_shown(then)} in one process"
                raise self._refused(stage, what)
        if not stage.is_last:
            return
        for path in (*self._whole.results, *results):
            here, there = (self._shown(each.get(path)) for each in (results, self._whole.results))
            if here != there:
                raise self._refused(stage, f"output {path or '(all)'} is {here} there, and {there} in one process")

    def _shown(self, tensor: Tensor | None) -> str:
        if tensor is None:
            return "not there"
        has_gradient = tensor.requires_grad and self._trains
        return f"{tuple(tensor.shape)} {tensor.dtype}{' with a gradient' if has_gradient else ''}"

    def _refused(self, stage: StageRange, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__} can't be cut before its layer '{self._first[stage.index]}': {what}. Stages "
            "send each other arguments of layers and what modules return. Pass it from layer to layer as an argument, "
            "return it from a module, compute it from the batch outside of the layers, or use `pp_size=1`."
        )


class _DryStages(StagedModel):
    """Runs stages for `_Search`.

    Attributes:
        carried: The absent arguments of the first layer of the stage that ran.
        calls: What the stage that ran called outside of the layers; see `WholeRun`.
        lacks: Returns whether values of which some outputs are told could be sent, and are not.
    """

    lacks: Callable[[Iterable[ModuleOutput]], bool]

    def __init__(self, model: nn.Module, cuts: Cuts, ranges: Sequence[StageRange], whole: WholeRun) -> None:
        super().__init__(model, cuts, ranges)
        self._whole = whole
        self._watch({output.module for output in whole.outputs})
        for layer, layer_forward in zip(cuts.trace.layers, self._layer_forwards, strict=True):
            layer_forward.is_quick = False  # each call is noted
            module: Any = self._modules[layer.name]
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
                self._undo.append(functools.partial(setattr, module, "gradient_checkpointing", True))  # noqa: FBT003
        self.carried: tuple[str, ...] = ()
        self.calls: list[Any] = []
        self._num_called = 0

    def begin(self, stage: StageRange) -> None:
        """Begin with a run of a stage."""
        self.carried, self.calls, self._num_called = (), [], 0
        self._first = stage.first
        self.enclose_calls()

    def _new_mode(self, stage: StageRange) -> TorchFunctionMode:
        del stage
        return NotedCalls(self.calls)

    def enter_layer(self, position: int) -> None:
        """Note that a layer begins."""
        self.calls.append(("layer", position))
        self._num_called = position + 1

    def _arrive(self, stage: StageRange, names: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take all absent arguments for such as come, but those that can't take their place afterwards."""
        del stage
        others = []
        for path, own in names.tensors(args, kwargs).items():
            if is_absent(own):
                if take_place(own, self._received[path]):
                    self.carried = (*self.carried, path)
                else:
                    others.append(own)
        if self.lacks(outputs_behind(others)):
            refuse("the first layer", others)

    def _output_of(self, name: str, absent: Tensor) -> Any:
        """Let absent outputs of modules inside of layers have the forms that they have in the whole model."""
        call = self._num_returns[name]
        self._num_returns[name] += 1
        outputs = [each for each in self._whole.outputs if (each.module, each.call) == (name, call)]
        if not outputs or not all(each.is_in_tuple for each in outputs):
            return absent
        values: dict[int | None, Any] = {}
        for each in outputs:
            form = ActivationMeta.of(self._whole.outputs[each])
            values[each.place] = self._received.get(each.name, absent_like(form, f"module '{name}'", (each,)))
            self._made[each.name] = values[each.place], version_of(values[each.place])
        if None in values:
            return values[None]
        return tuple(values.get(index) for index in range(1 + max(index or 0 for index in values)))

    def _on_return(self, name: str, output: Any) -> Any:
        """Let absent tensors that a module returned before the stage's own layers be from there."""
        call = self._num_returns[name]
        if self._num_called <= self._first and not (self._depth and not self._layers.intersection(prefixes(name))):
            leaves, form = leaves_by_path(output)
            if any(isinstance(leaf, AbsentTensor) for _, leaf in leaves):
                values = [
                    absent_like(ActivationMeta.of(leaf), leaf.origin, (ModuleOutput(name, call, path),))
                    if isinstance(leaf, AbsentTensor)
                    else leaf
                    for path, leaf in leaves
                ]
                output = pytree.tree_unflatten(values, form)
        return super()._on_return(name, output)


def _shown(call: Any) -> str:
    if call is None:
        return "nothing more"
    if call[0] == "layer":
        return f"layer {call[1]}"
    return f"`{call[0]}` on {', '.join(map(str, call[1:])) or 'no tensor'}"


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
