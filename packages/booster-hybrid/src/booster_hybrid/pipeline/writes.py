"""Writes in place that a cut model can't make as one process does: `boost` refuses them.

A stage runs its own layers, and the model's code outside of layers up to its end. Neither may write to a parameter that
the stage lacks, nor in training to what backward still uses: to parameters while other microbatches are on their way,
or to what was received, which is a leaf of the stage's graph. What a module returns is sent at the end of the stage:
if it is written to before, the next stage repeats the write on what has it already. Training and evaluation are both
looked at, as some models write in one of them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.recording import (
    LayerCall,
    LayerReturn,
    ModuleCall,
    ModuleReturn,
    Operation,
    Recording,
    SenderReturn,
)
from booster_hybrid.pipeline.values import sends

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.flow import Needs
    from booster_hybrid.pipeline.recording import Memory
    from booster_hybrid.pipeline.trace import Trace


def check_writes(
    model: str,
    trace: Trace,
    ranges: Sequence[StageRange],
    needs: Needs,
    is_held: Callable[[int, str], bool],
    recording: Recording,
    *,
    trains: bool,
) -> None:
    """Raise if a stage writes to what it receives or lacks.

    Args:
        model: What the model is called in errors.
        trace: What a dry run of it has seen.
        ranges: The layers of each stage.
        needs: What stages get and leave out in the recording's mode.
        is_held: Tells by stage and name whether a parameter is there, and used in its place.
        recording: Its forward in training, or in evaluation.
        trains: Whether there will be a backward.

    Raises:
        ConfigError: If so, naming the parameter or value.
    """
    walk = _Walk(model, trace, ranges, needs, is_training=bool(recording.is_training), trains=trains)
    for name, memory in recording.parameters.items():
        missing = [stage.index for stage in ranges if not is_held(stage.index, name)]
        walk.watch(memory, _Watched(f"parameter '{name}'", missing, is_parameter=True, is_kept=walk.has_backward))
    walk.through(recording)


@dataclass(frozen=True)
class _Watched:
    """Memory that some stages can't write to.

    Args:
        what: What it holds.
        stages: The stages.
        is_parameter: Whether that is a parameter.
        is_sent: Whether it is what a module returns, which the stage before sends when it ends.
        is_kept: Whether backward uses it.
    """

    what: str
    stages: Collection[int]
    is_parameter: bool = False
    is_sent: bool = False
    is_kept: bool = False


class _Walk:
    """What may not be written to along a recording."""

    def __init__(
        self,
        model: str,
        trace: Trace,
        ranges: Sequence[StageRange],
        needs: Needs,
        *,
        is_training: bool,
        trains: bool,
    ) -> None:
        self._model, self._trace, self._ranges, self._crossings = model, trace, ranges, needs.crossings
        self._is_training, self.has_backward = is_training, is_training and trains
        self._watched: dict[int, _Watched] = {}
        self._idle_on = needs.idle
        self._num_calls = 0
        self._inside: int | None = None
        self._layers: list[tuple[int | None, dict[int, _Watched]]] = []
        self._idle: list[Collection[int]] = []
        self._received: set[int] = set()  # which arguments of layers the stage has received that runs them

    def watch(self, memory: Memory, watched: _Watched) -> None:
        """Watch some memory."""
        if memory is not None:
            self._watched[memory] = watched

    def through(self, recording: Recording) -> None:
        """Walk through a recording.

        Raises:
            ConfigError: If a stage writes to what it must not.
        """
        for step in recording.steps:
            if isinstance(step, Operation):
                for memory in step.written:
                    self._write(memory, step.name.rpartition(":")[2])
            elif isinstance(step, LayerCall):
                self._call_layer(step)
            elif isinstance(step, LayerReturn):
                self._return_layer(step)
            elif isinstance(step, ModuleCall):
                self._idle.append(self._idle_on.get(step.name, frozenset()))
            elif isinstance(step, ModuleReturn):
                self._idle.pop()
            else:
                self._return_sender(step)

    def _write(self, memory: Memory, operation: str) -> None:
        watched = None if memory is None else self._watched.get(memory)
        if watched is None:
            return
        stages = [self._ranges[index] for index in sorted(watched.stages)]
        stage = next((each for each in stages if self._is_wrong(watched, each)), None)
        if stage is not None or (watched.is_parameter and watched.is_kept):
            raise self._error(watched, stage, operation)

    def _is_wrong(self, watched: _Watched, stage: StageRange) -> bool:
        """Return whether what runs now can't write to a tensor on a stage as in one process."""
        if self._inside is not None:
            has_begun, has_ended = self._inside >= stage.first, self._inside >= stage.last
            is_run = has_begun and not has_ended
        else:
            has_begun, has_ended = self._num_calls > stage.first, self._num_calls > stage.last
            is_run = not has_ended and not any(stage.index in stages for stages in self._idle)
        if watched.is_sent and not has_begun:
            return True
        return is_run and (watched.is_parameter or watched.is_kept)

    def _error(self, watched: _Watched, stage: StageRange | None, operation: str) -> ConfigError:
        mode, what = "training" if self._is_training else "evaluation", f"{watched.what} (by `{operation}`)"
        if stage is None:
            return ConfigError(
                f"{self._model} can't be cut into stages: in {mode}, its forward writes to {what}, which the backward "
                "of another microbatch may still use. Write to it outside of forward, or use `pp_size=1`."
            )
        if watched.is_parameter:
            return ConfigError(
                f"{self._model} can't be cut into stages: in {mode}, its forward writes to {what}, which stage "
                f"{stage.index} has not got. Turn off what does so (for RWKV, set `rescale_every` of its configuration "
                "to 0), write to it outside of forward, or use `pp_size=1`."
            )
        return ConfigError(
            f"{self._model} can't be cut before its layer '{self._trace.layers[stage.first].name}': in {mode}, its "
            f"forward changes in place {what}, which stage {stage.index} gets from the one before. Let it make a new "
            "tensor (`x = x * y` for `x *= y`, `inplace=False` for activations), cut elsewhere by "
            "`num_layers_per_stage`, or use `pp_size=1`."
        )

    def _call_layer(self, step: LayerCall) -> None:
        position, layer = step.position, self._trace.layers[step.position].name
        stage = next(each for each in self._ranges if each.first <= position < each.last)
        if position == stage.first:
            self._received = {
                step.objects[name] for name in self._crossings[stage.index].carried if name in step.objects
            }
        self._layers.append((self._inside, dict(self._watched)))
        self._num_calls, self._inside = self._num_calls + 1, position
        for name in (each for each, argument in step.objects.items() if argument in self._received):
            is_kept = self.has_backward and name in step.carried
            watched = _Watched(f"argument '{name}' of layer '{layer}'", [stage.index], is_kept=is_kept)
            self.watch(step.arguments[name], watched)

    def _return_layer(self, step: LayerReturn) -> None:
        """Watch other memory than inside; also where that is handed on."""
        handed = {copy: self._watched[memory] for memory, copy in step.copies if memory in self._watched}
        self._inside, self._watched = self._layers.pop()
        for copy, watched in handed.items():
            self.watch(copy, watched)

    def _return_sender(self, step: SenderReturn) -> None:
        """Watch what stages get of what a module returned."""
        for path, memory, copy in step.tensors:
            getting = [index for index, each in enumerate(self._crossings) if sends(each, step.name, step.call, path)]
            if getting:
                is_kept = self.has_backward and path in step.carried
                what = f"what module '{step.name}' returns"
                self.watch(copy, _Watched(what, getting, is_sent=True, is_kept=is_kept))
            elif memory in self._watched:
                self.watch(copy, self._watched[memory])
