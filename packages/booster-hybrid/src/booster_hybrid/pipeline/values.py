"""What stages need without a gradient: found in a recording, with a label on all that earlier layers make.

The autograd graph of a dry run (see `booster_hybrid.pipeline.flow`) shows what has a gradient. Masks, indices and
detached tensors have none. So the memory of each tensor carries a label: the stages on which its values are not those
of one process, as they were computed from what a layer of an earlier stage makes, or from parameters that are not
there. Labels pass from what each operation uses to what it makes, however a value gets from one to another: by a
return, an attribute, a container. An argument of a stage's first layer that has the stage's label is sent to it, as
arguments with a gradient are. What a stage receives has lost that stage's label. A label that is left on what a stage
sends, reads, or returns at the end is a value that was never sent. All that the layer or module which made it returns
is sent then as well; where that does not remove the label, the value is refused.

Each stage runs all that stands before its layers, such as an embedding, or a vision encoder. Where nothing that a
module returns is right on a stage, as its parameters are elsewhere, no value there depends on it: what does is sent.
So the module need not be run. Whether that holds is seen with all that the module makes labelled on these stages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.flow import Extra, Needs
from booster_hybrid.pipeline.recording import (
    LayerCall,
    LayerReturn,
    ModuleCall,
    ModuleReturn,
    Operation,
    Recording,
    SenderReturn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.flow import Crossing
    from booster_hybrid.pipeline.recording import Memory
    from booster_hybrid.pipeline.trace import Trace

_Label: TypeAlias = "Mapping[int, str]"
"""Stages on which a value is not that of one process, and what made it so."""


def add_values(
    model: str,
    trace: Trace,
    ranges: Sequence[StageRange],
    crossings: Sequence[Crossing],
    is_held: Callable[[int, str], bool],
    record: Callable[[frozenset[str]], list[Recording]],
) -> tuple[Needs, list[Recording]]:
    """Return what each stage gets from the one before, with values that have no gradient, and what need not be run.

    Args:
        model: What the model is called in errors.
        trace: What a dry run of it has seen.
        ranges: The layers of each stage.
        crossings: What each stage gets that has a gradient.
        is_held: Tells by stage and name whether a parameter is there, and used in its place.
        record: Records the model's forward, given the names of the modules whose outputs may be sent.

    Returns:
        What stages get and leave out, and what was recorded last.

    Raises:
        ConfigError: If a stage needs a value that is not an argument of its first layer; with the layer that makes it.
            Also where the recording has no end, or no output.
    """
    senders = frozenset(extra.module for crossing in crossings for extra in crossing.extras)
    recordings = record(senders)
    sources: dict[str, set[int]] = {}
    idle: dict[str, frozenset[int]] = {}
    may_idle = True
    while True:
        if not (recordings and recordings[-1].results):
            msg = f"{model} does not come to an end in that mode."
            raise ConfigError(msg)
        walk, recording = _Walk(model, trace, ranges, crossings, sources, idle), recordings[-1]
        for name, memory in recording.parameters.items():
            missing = [stage.index for stage in ranges if not is_held(stage.index, name)]
            walk.put(memory, dict.fromkeys(missing, f"parameter '{name}'"))
        try:
            walk.through(recording)
        except _NotSentError as error:
            if idle:  # something else needs what such a module computes
                idle, may_idle = {}, False
                continue
            name = _source(error.origin)
            position = next((index for index, layer in enumerate(trace.layers) if layer.name == name), None)
            has = [
                stage.index
                for stage in ranges[: error.stage]
                if (stage.first <= position < stage.last if position is not None else is_held(stage.index, error.of))
            ]
            added = set(range(has[0] + 1, error.stage + 1)) if name and has else set()
            if added <= sources.get(name, set()):
                raise ConfigError(str(error)) from None
            sources.setdefault(name, set()).update(added)
            if name not in recording.senders:
                recordings = record(recording.senders | {name})
        else:
            found = walk.found_idle()
            if idle or not (found and may_idle):
                return Needs(tuple(walk.crossings), idle), recordings
            idle = found  # which is right if nothing else of what these modules make is used there


class _NotSentError(ConfigError):
    """A stage needs a value that was not sent to it.

    Args:
        message: What to tell the user.
        stage: The stage.
        origin: What made the value; see `_Label`.
    """

    def __init__(self, message: str, stage: int, origin: str) -> None:
        super().__init__(message)
        self.stage, self.origin = stage, origin

    @property
    def of(self) -> str:
        """Name of the layer or parameter that made the value."""
        return self.origin.split("'")[1]


def _source(origin: str) -> str:
    """Return the name of the layer, or of the module with the parameter, that made a value."""
    name = origin.split("'")[1]
    return name if origin.startswith("layer") else name.rpartition(".")[0]


class _Walk:
    """The labels along a recording, at the places where stages begin, end and exchange something."""

    def __init__(
        self,
        model: str,
        trace: Trace,
        ranges: Sequence[StageRange],
        crossings: Sequence[Crossing],
        sources: Mapping[str, set[int]],
        idle: Mapping[str, frozenset[int]],
    ) -> None:
        self._model, self._trace, self._ranges, self.crossings = model, trace, ranges, [*crossings]
        self._sources, self._idle = sources, idle
        self._senders = {*sources, *(extra.module for crossing in crossings for extra in crossing.extras)}
        self._labels: dict[int, _Label] = {}
        self._received: dict[int | None, _Label] = {}  # of arguments, inside of the layer that is given them
        self._written: dict[int, set[int]] = {}  # stages whose own memory misses what layers of others write to it
        self._arrived: dict[int, tuple[Memory, set[int]]] = {}  # arguments that stand for what stages have received
        self._made_here: _Label = {}
        self._num_calls = 0
        self._inside: int | None = None
        self._layers: list[tuple[_Label, int | None, dict[int | None, _Label]]] = []
        self._modules: list[tuple[frozenset[int], _Label]] = []
        self._pure: dict[str, frozenset[int]] = {}

    def of(self, memory: Memory, argument: int | None = None) -> _Label:
        """Return the label of some memory, or of a tensor that is an argument of a layer."""
        if memory in self._received:
            return self._received[memory]
        label = {} if memory is None else self._labels.get(memory, {})
        if label and argument in self._arrived:
            return _without(label, self._arrived[argument][1])
        return label

    def put(self, memory: Memory, label: _Label) -> None:
        """Give some memory a label."""
        if memory in self._received:
            self._received[memory] = label
        if memory is not None:
            self._labels[memory] = label

    def through(self, recording: Recording) -> None:
        """Walk through a recording.

        Raises:
            _NotSentError: If a stage needs what was not sent to it.
        """
        for step in recording.steps:
            if isinstance(step, Operation):
                self._operate(step)
            elif isinstance(step, LayerCall):
                self._call_layer(step)
            elif isinstance(step, LayerReturn):
                self._made_here, self._inside, self._received = self._layers.pop()
            elif isinstance(step, ModuleCall):
                self._call_module(step)
            elif isinstance(step, ModuleReturn):
                self._return_module(step)
            else:
                self._return_sender(step)
        for path, memory, argument in recording.results:
            self._check(len(self._ranges) - 1, memory, f"output {path or '(all)'}", argument)

    def found_idle(self) -> dict[str, frozenset[int]]:
        """Return the stages on which modules need not run, of several inside of each other the outermost."""
        found: dict[str, frozenset[int]] = {}
        for name, stages in sorted(self._pure.items()):
            left = stages.difference(*(found[each] for each in found if name.startswith(f"{each}.")))
            if left:
                found[name] = left
        return found

    def _operate(self, step: Operation) -> None:
        label: dict[int, str] = {}
        for memory, argument in zip(step.used, step.arguments, strict=True):
            label.update(self.of(memory, argument))
        if step.is_read:
            self._check_read(label)
        label.update(self._made_here)
        for memory in step.written:
            before = self.of(memory)
            self.put(memory, {**label, **before})
            if memory is not None:
                self._written.setdefault(memory, set()).update(label.keys() - before.keys())
            for argument in [each for each, (own, _) in self._arrived.items() if own == memory]:
                del self._arrived[argument]  # what was received is not written to
        for memory in step.made:
            self.put(memory, label)

    def _call_layer(self, step: LayerCall) -> None:
        position, layer = step.position, self._trace.layers[step.position].name
        for stage in self._ranges:
            if stage.first == position:
                self._send_more(stage, step)
        for stage in self._ranges[:-1]:
            if stage.last == position:
                carried = self.crossings[stage.index + 1].carried
                for name in (each for each in carried if each in step.arguments):
                    what = f"argument '{name}' of layer '{layer}'"
                    self._check(stage.index, step.arguments[name], what, step.objects[name])
        running = next(stage for stage in self._ranges if stage.first <= position < stage.last)
        labels = {memory: _without(self.of(memory), [running.index]) for memory in self._receive(running, step)}
        self._layers.append((self._made_here, self._inside, self._received))
        self._num_calls, self._inside, self._received = self._num_calls + 1, position, {**self._received, **labels}
        later = [stage.index for stage in self._ranges if stage.first > position]
        self._made_here = dict.fromkeys(later, f"layer '{layer}'")

    def _call_module(self, step: ModuleCall) -> None:
        stages = self._idle.get(step.name, frozenset())
        self._modules.append((stages, self._made_here))
        if stages:
            self._made_here = {**self._made_here, **dict.fromkeys(stages, f"module '{step.name}'")}

    def _return_module(self, step: ModuleReturn) -> None:
        """Note the stages on which nothing that a module returns is right."""
        _, self._made_here = self._modules.pop()
        if any(sender.startswith(f"{step.name}.") for sender in self._senders):
            return
        wrong = [frozenset(self.of(*each)) for each in step.returned] if step.is_pure else []
        stages = wrong[0].intersection(*wrong[1:]) if wrong else frozenset()
        self._pure[step.name] = self._pure.get(step.name, stages) & stages

    def _return_sender(self, step: SenderReturn) -> None:
        """Take the label of those stages off that get what a module returned."""
        for path, memory, copy in step.tensors:
            if step.name in self._sources:
                self._send_return(Extra(step.name, step.call, path, self._num_calls))
            getting = [index for index, each in enumerate(self.crossings) if sends(each, step.name, step.call, path)]
            for index in getting:
                if index - 1 not in getting:
                    self._check(index - 1, memory, f"what module '{step.name}' returns")
            self.put(copy, _without(self.of(memory), getting))

    def _send_return(self, extra: Extra) -> None:
        """Let the stages that need it be sent what a module returned."""
        for index in self._sources[extra.module]:
            crossing = self.crossings[index]
            is_sent = sends(crossing, extra.module, extra.call, extra.path)
            if extra.position <= self._ranges[index].first and not is_sent:
                self.crossings[index] = dataclasses.replace(crossing, extras=(*crossing.extras, extra))

    def _send_more(self, stage: StageRange, step: LayerCall) -> None:
        """Let a stage be sent those arguments of its first layer that it can't compute by itself."""
        crossing = self.crossings[stage.index]
        more = [
            name
            for name, memory in step.arguments.items()
            if name not in step.carried and stage.index in self.of(memory, step.objects[name])
        ]
        self.crossings[stage.index] = dataclasses.replace(crossing, carried=(*crossing.carried, *more))

    def _receive(self, stage: StageRange, step: LayerCall) -> set[Memory]:
        """Return the memory of those of a layer's arguments that the stage which runs it has received."""
        received = set()
        for name, memory in step.arguments.items():
            argument = step.objects[name]
            if stage.first == step.position and name in self.crossings[stage.index].carried:
                received.add(memory)
                if memory is not None and stage.index in self._written.get(memory, ()):
                    self._send_written(stage, name, memory)
                elif stage.index in self.of(memory):
                    _, stages = self._arrived.get(argument, (memory, set()))
                    self._arrived[argument] = memory, {*stages, stage.index}
            elif argument in self._arrived and stage.index in self._arrived[argument][1]:
                received.add(memory)
        return received - {None}

    def _send_written(self, stage: StageRange, name: str, memory: Memory) -> None:
        """Let a stage write what it receives into the memory that it has of its own, which is right then."""
        crossing = self.crossings[stage.index]
        self.crossings[stage.index] = dataclasses.replace(crossing, written=(*crossing.written, name))
        self.put(memory, _without(self.of(memory), [stage.index]))

    def _check_read(self, label: _Label) -> None:
        """Refuse code that reads values which are not there on a stage that runs it."""
        for index in sorted(label.keys() - frozenset().union(*(stages for stages, _ in self._modules))):
            stage = self._ranges[index]
            runs = self._num_calls <= stage.last if self._inside is None else stage.first <= self._inside < stage.last
            if runs:
                raise self._error(index, "a value that forward reads (as by `.item()` or `if`)", label[index])

    def _check(self, index: int, memory: Memory, what: str, argument: int | None = None) -> None:
        label = self.of(memory, argument)
        if index in label:
            raise self._error(index, what, label[index])

    def _error(self, index: int, what: str, origin: str) -> _NotSentError:
        first = self._trace.layers[self._ranges[index].first].name
        return _NotSentError(
            f"{self._model} can't be cut before its layer '{first}': {what} depends on {origin}, which this "
            "stage has not got, by a value that stages don't send each other: one without a gradient (a mask, an "
            "index, a detached tensor), or in a container. Compute it from the batch outside of the layers, pass it "
            "from layer to layer as an argument, or use `pp_size=1`.",
            index,
            origin,
        )


def _without(label: _Label, stages: Collection[int]) -> _Label:
    return {stage: origin for stage, origin in label.items() if stage not in stages}


def sends(crossing: Crossing, module: str, call: int, path: str) -> bool:
    """Return whether a stage gets a tensor that a module returned."""
    return any((each.module, each.call, each.path) == (module, call, path) for each in crossing.extras)
