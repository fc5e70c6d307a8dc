"""Cutting an unmodified model into stages at the calls of its layers.

Each stage runs the model's own forward on the whole microbatch. Layers before its range return tensors without values,
its first layer gets the arguments that the stage before has sent, by name, and the first layer after its range ends the
forward, and its arguments are what this stage sends, but for those that the next one has by itself: masks, position
tables and the like are recomputed from the microbatch on each stage. What else later stages need goes along with these
arguments; see `booster_hybrid.pipeline.stages`. What a stage has not got is absent, and raises where it is read; see
`booster_hybrid.pipeline.absent`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.modules import prefixes
from booster_hybrid.pipeline.absent import (
    AbsentTensor,
    ActivationMeta,
    ResultForms,
    absent_like,
    is_absent,
    is_in_trial,
    letting_through,
    noting_errors,
    refuse,
    take_place,
)
from booster_hybrid.pipeline.label_means import CountedLoss
from booster_hybrid.pipeline.p2p import check_sendable
from booster_hybrid.pipeline.stage_forward import AbsentCalls, ArgumentNames, outside_of, show
from booster_hybrid.torch_functions import version_of
from booster_runtime.data import call_with, leaves_by_path, named_forward, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode

    from booster_core.errors import AbsentValueError
    from booster_hybrid.pipeline.absent import ModuleOutput
    from booster_hybrid.pipeline.trace import Layer, Trace
    from booster_hybrid.random_streams import MicrobatchStreams


@dataclass(frozen=True)
class StageRange:
    """The layers of one stage.

    Args:
        index: Number of the stage.
        first: Its first layer, counted in the order of the trace.
        last: One past its last layer.
        num_layers: Layers of the whole model.
    """

    index: int
    first: int
    last: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the model's outputs leave here."""
        return self.last == self.num_layers

    def uses(self, positions: Sequence[int]) -> bool:
        """Return whether a module outside of the layers is used here, given how many layers came before each use."""
        return any(self.first < place <= self.last or (self.is_first and place == 0) for place in positions)


def share_layers(num_layers: int, num_stages: int, asked: Sequence[int] | None = None) -> list[StageRange]:
    """Return each stage's layers; the middle stages have one more where they can't be shared equally.

    Args:
        num_layers: Layers of the whole model.
        num_stages: Number of stages.
        asked: Number of layers of each stage; ``None`` shares them out. The first and the last stage hold embedding
            and head as well, so they have none of what is left over.

    Raises:
        ConfigError: If there are fewer layers than stages, or ``asked`` does not add up.
    """
    if asked is not None:
        if len(asked) != num_stages or sum(asked) != num_layers or min(asked) < 1:
            msg = (
                f"`num_layers_per_stage={list(asked)}` must list {num_stages} positive numbers that add up to the "
                f"model's {num_layers} layers."
            )
            raise ConfigError(msg)
        counts = list(asked)
    else:
        if num_layers < num_stages:
            msg = f"{num_layers} layers can't fill {num_stages} stages. Use fewer stages, or fewer chunks on each rank."
            raise ConfigError(msg)
        share, more = divmod(num_layers, num_stages)
        counts = [share] * num_stages
        start = (num_stages - more + 1) // 2
        for stage in range(start, start + more):
            counts[stage % num_stages] += 1
    edges = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [StageRange(stage, edges[stage], edges[stage + 1], num_layers) for stage in range(num_stages)]


def held_modules(modules: Mapping[str, nn.Module], trace: Trace, stages: Sequence[StageRange]) -> set[str]:
    """Return the names of the modules whose own parameters are needed in some stages.

    Args:
        modules: The model's modules by name.
        trace: What a dry run of it has seen; a module that was not called is needed everywhere.
        stages: The stages.
    """
    elsewhere = {
        layer.name
        for position, layer in enumerate(trace.layers)
        if not any(stage.first <= position < stage.last for stage in stages)
    }
    held = set()
    for name in modules:
        uses = trace.uses.get(name)
        if uses is not None:
            if not uses or any(stage.uses(uses) for stage in stages):
                held.add(name)
        elif not any(part in elsewhere for part in prefixes(name)):
            held.add(name)
    return held


def held_parameters(modules: Mapping[str, nn.Module], trace: Trace, stage: StageRange) -> set[int]:
    """Return the ``id`` of the parameters that a stage needs."""
    return {
        id(parameter)
        for name in held_modules(modules, trace, [stage])
        for parameter in modules[name].parameters(recurse=False)
    }


def idle_modules(
    modules: Mapping[str, nn.Module], trace: Trace, stages: Sequence[StageRange]
) -> dict[str, frozenset[int]]:
    """Return the modules outside of the layers of whose parameters a stage has none, with these stages.

    What such a module returns is absent there, and sent where it is needed. So the module need not be run. Of several
    inside of each other it is the outermost.
    """
    layers = {layer.name for layer in trace.layers}
    around = {part for layer in layers for part in prefixes(layer)}
    held = {stage.index: held_parameters(modules, trace, stage) for stage in stages}
    found: dict[str, frozenset[int]] = {}
    for name, module in modules.items():
        if not name or name in around or layers.intersection(prefixes(name)):
            continue
        own = {id(parameter) for parameter in module.parameters()}
        done = frozenset().union(*(found.get(part, ()) for part in prefixes(name)))
        without = {stage for stage, ids in held.items() if own and own.isdisjoint(ids)} - done
        if without:
            found[name] = frozenset(without)
    return found


@dataclass(frozen=True)
class BoundarySpec:
    """What a stage gets from the one before.

    Args:
        carried: Paths of arguments of its first layer.
        outputs: What modules return that it needs as well, or the stages after it.
    """

    carried: tuple[str, ...] = ()
    outputs: tuple[ModuleOutput, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of it."""
        return (*self.carried, *(output.name for output in self.outputs))


@dataclass(frozen=True)
class StageInputs:
    """What stages get in training or in evaluation.

    Args:
        boundaries: What each stage gets from the one before.
        skips_idle: Whether stages leave out modules of which they have no parameters; see `idle_modules`.
    """

    boundaries: tuple[BoundarySpec, ...]
    skips_idle: bool = True


@dataclass(frozen=True)
class Cuts:
    """Where a model may be cut, and what its stages need.

    Args:
        trace: What a dry run of the model has seen.
        needs: What stages get in training (``True``) and in evaluation.
        idle: The modules outside of the layers that some stages leave out, with these stages; see `idle_modules`.
        draws_on_host: Whether forward draws from the generators of Python or numpy.
    """

    trace: Trace
    needs: Mapping[bool, StageInputs]
    idle: Mapping[str, frozenset[int]] = field(default_factory=dict)
    draws_on_host: bool = False

    @property
    def sent_names(self) -> set[str]:
        """Names of all that stages send to each other."""
        return {name for needs in self.needs.values() for each in needs.boundaries for name in each.names}

    @functools.cached_property
    def sent(self) -> Mapping[str, frozenset[ModuleOutput]]:
        """What modules return that may be sent, by the module's name."""
        found: dict[str, set[ModuleOutput]] = defaultdict(set)
        for boundary in (each for needs in self.needs.values() for each in needs.boundaries):
            for output in boundary.outputs:
                found[output.module].add(output)
        return {name: frozenset(outputs) for name, outputs in found.items()}


class StageEnd(BaseException):
    """Ends a forward at the first layer after a stage, with what the stage sends."""

    def __init__(self, payload: dict[str, Tensor]) -> None:
        super().__init__("the stage has ended")
        self.payload = payload


_NOT_THERE = object()


class StagedModel:
    """A model whose forward runs one stage at a time.

    Args:
        model: The user's model; its layers get other forwards, and the parameters that no stage of this rank uses
            give their memory back.
        cuts: Where it is cut, and what its stages need.
        stages: The stages of this rank.
        dtype_of: Tells the format in which the run works with a parameter; ``None`` leaves all parameters in place.
        has_collectives: Whether modules communicate in forward, so that each is run on every stage that comes to it.

    Attributes:
        model: As above.
        forms: What operations on absent tensors return.
        hollow: Names of the parameters that are not here.
        forward: What runs the model: itself, unless something is set that puts its number formats around it.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        stages: Sequence[StageRange],
        dtype_of: Callable[[nn.Parameter], torch.dtype] | None = None,
        *,
        has_collectives: bool = False,
    ) -> None:
        self.model = model
        self.forward: Callable[..., Any] = model
        self.cuts = cuts
        self._active: StageRange | None = None
        self._received: Mapping[str, Tensor] = {}
        self._streams: MicrobatchStreams | None = None
        self._is_forward = False
        self._mode: TorchFunctionMode | None = None
        self.forms = ResultForms()
        self._layer_forwards: list[_LayerForward] = []
        self._layer_forward_of: dict[int, _LayerForward] = {}
        self._hollow_places: list[tuple[dict[str, Any], str, Any]] = []
        self._num_returns: Counter[str] = Counter()
        self._num_idle: Counter[str] = Counter()
        self._made: dict[str, tuple[Tensor, int]] = {}
        self._has_begun = False
        self._depth = 0
        self._undo: list[Callable[[], None]] = []
        self.stages = {stage.index: stage for stage in stages}
        self._modules = modules = dict(model.named_modules())
        self._place_gates(modules, may_be_tried=not has_collectives)
        self.hollow = [] if dtype_of is None else self._hollow(modules, dtype_of)
        self._inner: dict[int, list[tuple[nn.Module, str, int]]] = defaultdict(list)
        self._watch(cuts.sent)

    def _place_gates(self, modules: Mapping[str, nn.Module], *, may_be_tried: bool) -> None:
        """Replace the forwards of layers, and of modules outside of them that some stages leave out."""
        trace = self.cuts.trace
        for name in trace.uncalled:
            self._set_forward(modules[name], _Refusal(name, type(self.model).__name__, modules[name]))
        for position, layer in enumerate(trace.layers):
            module: Any = modules[layer.name]
            if getattr(module, "gradient_checkpointing", False) and not self._holds(position):
                module.gradient_checkpointing = False  # nothing is kept of a layer that is not run
            layer_forward = _LayerForward(self, module, position, may_be_tried=may_be_tried)
            self._layer_forwards.append(layer_forward)
            self._layer_forward_of[id(module)] = layer_forward
            self._set_forward(module, layer_forward)
        self._leaving = [layer_forward for layer_forward in self._layer_forwards if layer_forward.layer.kept]
        self._layers = {layer.name for layer in trace.layers}
        self._enclosed = [
            module
            for name, module in modules.items()
            if id(module) in self._layer_forward_of or not self._layers.intersection(prefixes(name))
        ]
        self.enclose_calls()
        for name in sorted(self.cuts.idle) if may_be_tried else ():
            self._set_forward(modules[name], _Idle(self, name, modules[name]))

    def _set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = vars(module).get("forward")
        module.forward = forward
        self._undo.append(
            functools.partial(setattr, module, "forward", before)
            if before is not None
            else functools.partial(delattr, module, "forward")
        )

    def restore(self) -> None:
        """Take everything away from the model that was put on it, but for parameters that are not here."""
        while self._undo:
            self._undo.pop()()

    def _watch(self, names: Iterable[str]) -> None:
        """Watch modules whose outputs are sent."""
        position_of = {layer.name: position for position, layer in enumerate(self.cuts.trace.layers)}
        for name in sorted(names):
            handle = self._modules[name].register_forward_hook(
                lambda _, __, output, name=name: self._on_return(name, output),
                prepend=True,  # other hooks see what was received
            )
            self._undo.append(handle.remove)
            for around in list(prefixes(name))[1:]:
                if around in position_of:
                    self._inner[position_of[around]].append((self._modules[name], name, handle.id))

    def _on_return(self, name: str, output: Any) -> Any:
        """Keep what later stages need of what a module returned, and replace in it what earlier ones have sent."""
        if self._depth and not self._is_of_layer(name):
            return output  # of a module outside of the layers that a layer calls
        call = self._num_returns[name]
        self._num_returns[name] += 1
        wanted = {each.path: each.name for each in self.cuts.sent.get(name, ()) if each.call == call}
        if self._active is None or not wanted:
            return output
        leaves, form = leaves_by_path(output)
        values = []
        for path, leaf in leaves:
            key = wanted.get(path)
            values.append(leaf if key is None else self._received.get(key, leaf))
            if key is not None:
                self._made[key] = values[-1], version_of(values[-1])
        return pytree.tree_unflatten(values, form) if wanted.values() & self._received.keys() else output

    def _is_of_layer(self, name: str) -> bool:
        """Return whether a module is a layer or inside of one."""
        return not self._layers.isdisjoint(prefixes(name))

    def layer(self, position: int) -> Layer:
        """Return what is known of a layer."""
        return self.cuts.trace.layers[position]

    @property
    def needs(self) -> StageInputs:
        """What stages get in the mode that the model is in."""
        return self.cuts.needs[self.model.training]

    def _holds(self, position: int) -> bool:
        return any(stage.first <= position < stage.last for stage in self.stages.values())

    def _hollow(self, modules: Mapping[str, nn.Module], dtype_of: Callable[[nn.Parameter], torch.dtype]) -> list[str]:
        """Give back the memory of parameters that no stage here uses, and return their names."""
        held = held_modules(modules, self.cuts.trace, [*self.stages.values()])
        kept = {id(parameter) for name in held for parameter in modules[name].parameters(recurse=False)}
        gone = []
        for name, module in modules.items():
            if name not in held:
                for key, parameter in list(module.named_parameters(recurse=False)):
                    if id(parameter) in kept:
                        continue
                    gone.append(f"{name}.{key}" if name else key)
                    form = ActivationMeta.of(parameter)._replace(dtype=dtype_of(parameter))
                    del module._parameters[key]  # noqa: SLF001 - the only way to leave a plain tensor in its place
                    absent: Any = absent_like(form, f"parameter '{gone[-1]}'")
                    absent._is_param = True  # noqa: SLF001 - what `isinstance` asks for, as in `get_parameter`
                    object.__setattr__(module, key, absent)
                    self._hollow_places.append((module._parameters, key, absent))  # noqa: SLF001 - where they are looked for
        return gone

    @contextlib.contextmanager
    def activated(
        self, stage: int, received: Mapping[str, Tensor], streams: MicrobatchStreams | None = None
    ) -> Iterator[None]:
        """Let the layers act for one stage and one microbatch, in forward and where backward recomputes layers.

        Parameters of other stages are in their modules then, so that what goes through all of them raises in place of
        leaving some out.

        Args:
            stage: Number of the stage.
            received: What the stage before has sent for the microbatch.
            streams: Where the microbatch draws from; ``None`` leaves the generators alone.
        """
        before = self._active, self._received, self._streams
        self._active, self._received, self._streams = self.stages[stage], received, streams
        places = self._hollow_places if before[0] is None else ()
        for parameters, key, absent in places:
            parameters[key] = absent
        try:
            yield
        finally:
            self._active, self._received, self._streams = before
            for parameters, key, _ in places:
                del parameters[key]

    @contextlib.contextmanager
    def showing_absent_state(self) -> Iterator[None]:
        """Let a criterion raise that reads attributes of other stages."""
        with noting_errors([]), self._without_attributes_of_others():
            yield

    @contextlib.contextmanager
    def _without_attributes_of_others(self) -> Iterator[None]:
        """Let what layers of other stages write into their modules be absent inside: here it is old, or not there."""
        stage = self._active
        before: list[tuple[Any, str, Any]] = []
        assert stage is not None, "a stage is active"
        for layer_forward in self._leaving:
            for kept in () if stage.first <= layer_forward.position < stage.last else layer_forward.layer.kept:
                module = self._modules[kept.module]
                places: Any = module._buffers if kept.name in module._buffers else vars(module)  # noqa: SLF001 - assignment would check the class
                before.append((places, kept.name, places.get(kept.name, _NOT_THERE)))
                places[kept.name] = kept.absent(layer_forward.layer.name)
        try:
            yield
        finally:
            for places, name, value in before:
                if value is _NOT_THERE:
                    places.pop(name, None)
                else:
                    places[name] = value

    def run(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """Run the active stage.

        Args:
            batch: As the data loader yields it; see `call_with` and `taken_by` in `booster_runtime.data`.

        Returns:
            The model's outputs on the last stage, else ``None``; and what the next stage has to get, by name.

        Raises:
            AbsentValueError: If a value was read that this stage has not got, also where the model caught that.
            ConfigError: If the forward skipped the layer with which the stage begins, or that with which the next one
                does, so that what was received was not used, or nothing is there to send.

        Collective: as the model's own forward.
        """
        self._num_returns.clear()
        self._num_idle.clear()
        self._made = {}
        self._has_begun = False
        outputs, payload = None, None
        errors: list[AbsentValueError] = []
        stage = self._active
        assert stage is not None, "a stage is active"
        if self._streams is not None:
            self._streams.begin()
        mode = self._mode = self._new_mode(stage)
        self._is_forward = True
        try:
            with (
                self._without_attributes_of_others(),
                noting_errors(errors),
                letting_through(self.forms),
                contextlib.nullcontext() if mode is None else mode,
            ):
                outputs = call_with(self.forward, taken_by(self.model, batch))
        except StageEnd as end:
            payload = end.payload
        finally:
            self._is_forward, self._mode, self._made = False, None, {}
        if errors:
            raise errors[0]
        if payload is None and not stage.is_last:
            raise self._skipped(stage, stage.last, f"with which stage {stage.index + 1} begins")
        if not (self._has_begun or stage.is_first):
            raise self._skipped(stage, stage.first, "with which it begins")
        return outputs, payload or {}

    def _new_mode(self, stage: StageRange) -> TorchFunctionMode | None:
        """Return what looks at the functions that a stage calls outside of its layers."""
        return CountedLoss() if stage.is_last else None

    def enclose_calls(self) -> None:
        """Stand around layers with their hooks, and around what is compiled, which is not to depend on the stage.

        What is compiled later is enclosed when this is called again.
        """
        for module in self._enclosed:
            compiled = module._compiled_call_impl  # noqa: SLF001 - where `Module.compile` leaves it
            layer_forward = self._layer_forward_of.get(id(module))
            if isinstance(compiled, (_LayerCall, _OutsideCall)) or (compiled is None and layer_forward is None):
                continue
            call = (
                _LayerCall(self, module, layer_forward, compiled)
                if layer_forward is not None
                else _OutsideCall(self, module, compiled)
            )
            module._compiled_call_impl = call  # noqa: SLF001 - likewise
            self._undo.append(functools.partial(setattr, module, "_compiled_call_impl", compiled))

    @property
    def is_in_forward(self) -> bool:
        """Whether a stage's forward runs, rather than a recomputation in its backward."""
        return self._is_forward

    def call_layer(
        self,
        layer_forward: _LayerForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        """Do what a layer does in the active stage.

        Args:
            layer_forward: The layer's.
            args: Its arguments.
            kwargs: Those by name.
            forward: What to run it by; ``None`` for its forward.

        Raises:
            ConfigError: If no stage is active, and this rank lacks some of the layers.
        """
        stage, position = self._active, layer_forward.position
        if stage is not None and position < stage.first:
            return layer_forward.pass_through(args, kwargs)
        forward = forward or layer_forward.forward
        if stage is None:
            if not self.hollow:
                return forward(*args, **kwargs)
            msg = (
                f"{type(self.model).__name__} is cut into pipeline stages, of which this rank has only some, so that "
                "it can't be called by itself. Run batches through `booster.execute_pipeline`; it evaluates where it "
                "is given no optimizer."
            )
            raise ConfigError(msg)
        if position > stage.last:
            raise self._skipped(stage, stage.last, f"with which stage {stage.index + 1} begins")
        if position > stage.first > 0 and self._is_forward and not self._has_begun:
            raise self._skipped(stage, stage.first, "with which it begins")
        if position == stage.last:
            raise StageEnd(self._payload(stage, layer_forward, args, kwargs))
        with outside_of(self._mode), letting_through(None):
            if position == stage.first:
                self._has_begun = True
                if position > 0:
                    self._arrive(stage, layer_forward.names, args, kwargs)
            self._depth += 1
            try:
                output = forward(*args, **kwargs)
            finally:
                self._depth -= 1
            layer_forward.check(output, args, kwargs)
        return output

    def _arrive(self, stage: StageRange, names: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let absent arguments of a stage's first layer be what has come, also for the code that goes on.

        Raises:
            AbsentValueError: If one can't be.
            ConfigError: If the stage before had no tensor to send as one of them.
        """
        for path, own in names.at(self.needs.boundaries[stage.index].carried, args, kwargs).items():
            if not is_absent(own):
                continue
            what = f"argument '{path}' of layer '{self.layer(stage.first).name}'"
            if path not in self._received:
                raise self._without_tensor(stage.index - 1, what)
            if not take_place(own, self._received[path]):
                refuse(what, own)

    def enter_layer(self, position: int) -> None:
        """Let a layer that is run draw from its stream; streams of ranks that share it out come inside of this one."""
        if self._streams is not None and self._runs(position):
            self._streams.enter(position + 1, gives_back=self._is_forward)

    def leave_layer(self, position: int) -> None:
        """Go on to draw where the layer began to."""
        if self._streams is not None and self._is_forward and self._runs(position):
            self._streams.leave()

    def _runs(self, position: int) -> bool:
        stage = self._active
        return stage is not None and stage.first <= position < stage.last

    def call_module(self, idle: _Idle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a module outside of the layers does in the active stage, which may have nothing to compute there."""
        stage = self._active
        if not self._is_forward or stage is None or self._depth or is_in_trial():
            return idle.forward(*args, **kwargs)
        call = self._num_idle[idle.name]
        self._num_idle[idle.name] += 1
        if self._streams is not None:
            self._streams.enter(crc32(f"{idle.name}#{call}".encode()) + 2**32)
        if stage.index in self.cuts.idle[idle.name] and self.needs.skips_idle:
            try:
                output = idle.calls.result(self.forms, args, kwargs)
            except Exception:  # noqa: BLE001 - its forward raises it, or needs no form
                output = idle.forward(*args, **kwargs)
        else:
            output = idle.forward(*args, **kwargs)
        if self._streams is not None:
            self._streams.leave()
        return output

    def show_what_came(self, position: int, absent: Tensor) -> None:
        """Let those who watch modules inside of a layer that is not run see what came of these, or that it is absent.

        Args:
            position: The layer's.
            absent: What stands for outputs that did not come.
        """
        known = {id(module): (name, own) for module, name, own in self._inner.get(position, ())}
        with outside_of(self._mode):
            for module in self._layer_forwards[position].calls.parts:
                if module._forward_hooks:  # noqa: SLF001 - torch tells it nowhere else
                    name, own = known.get(id(module), ("", None))
                    show(module, self._output_of(name, absent), without=own)

    def _output_of(self, name: str, absent: Tensor) -> Any:
        """Return what a module inside of a layer that is not run has returned, as far as it came."""
        outputs = self.cuts.sent.get(name, ())
        came = {each.place: self._received[each.name] for each in outputs if each.name in self._received}
        if None in came or not came:
            return came.get(None, absent)
        return tuple(came.get(index) for index in range(1 + max(index or 0 for index in came)))

    def _payload(
        self, stage: StageRange, layer_forward: _LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Return what the next stage gets: arguments of its first layer, and what else it needs.

        Nothing stands for an argument that is no tensor for this batch, and for what a module would return that the
        model's code does not call for it, as for a batch without images. The next stage runs the same code: what it
        has there all the same is absent, and raises where it is read.

        Raises:
            AbsentValueError: If the stage itself has not got some of it.
            ConfigError: If some of it is not there, or was changed in place since a module returned it.
        """
        boundary, layer = self.needs.boundaries[stage.index + 1], layer_forward.layer
        found = {
            name: (f"argument '{name}' of layer '{layer.name}'", value)
            for name, value in layer_forward.names.at(boundary.carried, args, kwargs).items()
        }
        for output in boundary.outputs:
            if not self._is_of_layer(output.module) and self._num_returns[output.module] <= output.call:
                continue
            what = f"what module '{output.module}' returns"
            value, version = self._made.get(output.name, (self._received.get(output.name), 0))
            if not isinstance(value, torch.Tensor):
                raise self._without_tensor(stage.index, what)
            if output.name in self._made and version_of(value) != version:
                msg = (
                    f"{type(self.model).__name__} can't be cut before its layer '{layer.name}': its forward changes "
                    f"in place {what}, which the next stage gets and would change again. Let it make a new tensor "
                    "(`x = x * y` for `x *= y`), or use `pp_size=1`."
                )
                raise ConfigError(msg)
            found[output.name] = (what, value)
        for what, value in found.values():
            if is_absent(value):
                refuse(f"sending {what} to stage {stage.index + 1}", value)
            check_sendable(value, what)
        return {name: value for name, (_, value) in found.items()}

    def _without_tensor(self, stage: int, what: str) -> ConfigError:
        """Return the error of a stage that can't send what it sent in the dry run."""
        return ConfigError(
            f"Stage {stage} of {type(self.model).__name__} has no tensor to send as {what}, which was one in the dry "
            "run at `boost`. Pass an `example_batch` like the batches that are run, or use `pp_size=1`."
        )

    def _shown(self, stage: StageRange) -> str:
        first, last = self.layer(stage.first).name, self.layer(stage.last - 1).name
        return f"Stage {stage.index} of {type(self.model).__name__} ('{first}' to '{last}')"

    def _skipped(self, stage: StageRange, position: int, what: str) -> ConfigError:
        """Return the error of a stage whose forward did not call a layer."""
        return ConfigError(
            f"{self._shown(stage)} ended without a call of layer '{self.layer(position).name}', {what}: no "
            "activations can pass from stage to stage without it. Keep the model from skipping layers (set `layerdrop` "
            "to 0), or use `pp_size=1`."
        )


class _LayerForward:
    """The forward of a layer in a staged model."""

    takes_inside = True
    """Activation checkpointing goes inside: around, it would keep what stands for inputs that have still to arrive."""

    def __init__(self, staged: StagedModel, module: nn.Module, position: int, *, may_be_tried: bool) -> None:
        self._staged, self.position = staged, position
        self.layer = layer = staged.layer(position)
        self.forward = module.forward
        named = named_forward(module)
        self.names = ArgumentNames(named)
        self.__signature__ = inspect.signature(named)  # callers look at what a layer takes
        self.origin = f"layer '{layer.name}'"
        self.calls = AbsentCalls(module, module.forward, self.origin)
        self._may_be_tried = may_be_tried
        # The argument that the output is like, where that is all there is to tell of it, as of most layers.
        self._like = layer.returned.argument if layer.returned.has_shapes and not layer.writes else None
        self.is_quick = self._like is not None and self.names.is_first(self._like)
        self.is_open = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_open:
            return self.forward(*args, **kwargs)
        return self._staged.call_layer(self, args, kwargs)

    def pass_through(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what stands for the layer's output where it is not run: of the same form, without its values."""
        is_watched = self.calls.is_watched
        if self._like is not None and not is_watched:
            value = args[0] if args and self.is_quick else self.names.get(self._like, args, kwargs)
            if isinstance(value, torch.Tensor):
                return absent_like(ActivationMeta.of(value), self.origin)
        if self._may_be_tried and not self.layer.returned.has_shapes:
            return self.calls.result(self._staged.forms, args, kwargs)
        if self.layer.writes:
            self._refuse_writes(dict(self.names.leaves(args, kwargs)))
        arguments = self._arguments(args, kwargs)
        forms = {
            path: absent_like(ActivationMeta.of(leaf), self.origin)
            for path, leaf in arguments.items()
            if isinstance(leaf, torch.Tensor)
        }
        if is_watched and forms:
            self._staged.show_what_came(self.position, next(iter(forms.values())))
        given: set[int] = set()

        def one_each(value: AbsentTensor) -> Tensor:
            """Return another one in the place of one that stands for two tensors, of which other values arrive."""
            if id(value) in given:
                return absent_like(ActivationMeta.of(value), self.origin)
            given.add(id(value))
            return value

        return pytree.tree_map_only(AbsentTensor, one_each, self.layer.returned.of({**arguments, **forms}))

    def _refuse_writes(self, arguments: Mapping[str, Any]) -> None:
        """Raise if the layer would change an argument that this stage has, in place: here it stays as it was."""
        for path in self.layer.writes:
            if isinstance(arguments.get(path), torch.Tensor) and not isinstance(arguments[path], AbsentTensor):
                msg = (
                    f"Layer '{self.layer.name}' changes its argument '{path}' in place, which later pipeline stages "
                    "have as it was before. Let it return a new tensor for the next layer, or use `pp_size=1`."
                )
                raise ConfigError(msg)

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments of a call, by path, that outputs may be like."""
        name = self.layer.returned.argument
        value = None if name is None else self.names.get(name, args, kwargs)
        return dict(self.names.leaves(args, kwargs)) if name is None or value is None else {name: value}

    def check(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if a layer that was run returned tensors of other shapes than stages that did not run it assume."""
        returned = self.layer.returned
        if self._may_be_tried and not returned.has_shapes:
            return
        name = returned.argument
        like = None if name is None else self.names.get(name, args, kwargs)
        if isinstance(like, torch.Tensor) and isinstance(output, torch.Tensor) and like.shape == output.shape:
            return  # as most layers do
        found = returned.other_shapes(output, self._arguments(args, kwargs))
        if found is not None:
            msg = (
                f"Layer '{self.layer.name}' returned a tensor of shape {tuple(found[1])} where the dry run at `boost` "
                f"saw one like its argument, which has shape {tuple(found[0])} now. Pass an `example_batch` in which "
                "no two dimensions (samples, positions, width) are equal by chance, or use `pp_size=1`."
            )
            raise ConfigError(msg)


class _LayerCall:
    """What a layer is called by, in place of what `nn.Module` does: around its hooks, and what was compiled of it.

    Args:
        staged: The staged model.
        module: The layer.
        layer_forward: Its forward.
        compiled: What `Module.compile` has left; ``None`` for nothing.
    """

    __slots__ = ("_compiled", "_hooks", "_layer_forward", "_module", "_origin", "_position", "_staged")

    def __init__(
        self, staged: StagedModel, module: nn.Module, layer_forward: _LayerForward, compiled: Callable[..., Any] | None
    ) -> None:
        self._staged, self._module, self._layer_forward, self._compiled = staged, module, layer_forward, compiled
        self._position, self._origin = layer_forward.position, layer_forward.origin
        self._hooks = [
            hooks
            for each in module.modules()
            for hooks in (each._forward_hooks, each._forward_pre_hooks)  # noqa: SLF001 - torch tells it nowhere else
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage, position = self._staged._active, self._position  # noqa: SLF001 - an attribute costs less than a property
        # A model may have many layers before the stage, each of which is called in each microbatch.
        is_before = stage is not None and position < stage.first
        if is_before and self._layer_forward.is_quick and not any(self._hooks):
            value = args[0] if args else None
            if type(value) is AbsentTensor:
                return absent_like(value.form, self._origin)
        self._staged.enter_layer(position)
        if self._compiled is None or is_before or (stage is not None and position >= stage.last):
            output = self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what would be called
        else:
            output = self._staged.call_layer(self._layer_forward, args, kwargs, self._run_compiled)
        self._staged.leave_layer(position)
        return output

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run what was compiled, in which the layer's own forward is open."""
        assert self._compiled is not None, "it was compiled"
        self._layer_forward.is_open = True
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._layer_forward.is_open = False


class _OutsideCall:
    """What a compiled module outside of the layers is called by.

    In a stage's forward it meets values that are absent, and runs as if it had not been compiled.
    """

    def __init__(self, staged: StagedModel, module: nn.Module, compiled: Any) -> None:
        self._staged, self._module, self._compiled = staged, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._module._call_impl if self._staged.is_in_forward else self._compiled  # noqa: SLF001 - what `Module.compile` has compiled
        return call(*args, **kwargs)


class _Idle:
    """The forward of a module outside of the layers that need not be run on some stages."""

    def __init__(self, staged: StagedModel, name: str, module: nn.Module) -> None:
        self._staged, self.name = staged, name
        self.forward = module.forward
        self.calls = AbsentCalls(module, module.forward, f"module '{name}'")
        self.__signature__ = inspect.signature(named_forward(module))  # callers look at what a module takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._staged.call_module(self, args, kwargs)


class _Refusal:
    """The forward of a layer that the dry run did not see: which stage has to run it is not known."""

    def __init__(self, name: str, model: str, module: nn.Module) -> None:
        self._name, self._model = name, model
        self.__signature__ = inspect.signature(named_forward(module))  # callers look at what a layer takes

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        msg = (
            f"{self._model} calls layer '{self._name}', which the dry run at `boost` did not, so that no stage "
            "runs it. Pass an `example_batch` like the batches that are run, or use `pp_size=1`."
        )
        raise ConfigError(msg)
