"""What stages need without a gradient: found in a dry run in which all that earlier layers make is labelled.

The autograd graph of a dry run (see `booster_hybrid.pipeline.flow`) shows what has a gradient. Masks, indices and
detached tensors have none. So in one more dry run every storage carries a label: the stages on which its values are not
those of one process, as they were computed from what a layer of an earlier stage makes, or from parameters that are not
there. Labels pass from the inputs of each operation to its outputs, however a value gets from one to another: by a
return, an attribute, a container. An argument of a stage's first layer that has the stage's label is sent to it, as
arguments with a gradient are. What a stage receives has lost that stage's label. A label that is left on what a stage
sends, reads, or returns at the end is a value that was never sent. The dry run is repeated then, with all that the
layer or module which made it returns sent as well; where that does not remove the label, the value is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.arguments import ArgumentNames
from booster_hybrid.pipeline.cut import given_names
from booster_hybrid.pipeline.flow import Extra
from booster_hybrid.pipeline.idle import IdleModules
from booster_hybrid.pipeline.skipped_layers import FixedDraws
from booster_hybrid.pipeline.trace import call_on, is_carried, replace_forward, run_dry, stand_ins
from booster_hybrid.pipeline.writes import storage_key, written_by
from booster_runtime.data import leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.flow import Crossing
    from booster_hybrid.pipeline.trace import Trace

_Label: TypeAlias = "Mapping[int, str]"
"""Stages on which a value is not that of one process, and what made it so."""
_READS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}  # noqa: SLF001 - what `item` calls
)
"""Operations that turn a tensor's values into Python's."""
_FORMS = frozenset(
    {f"aten::{name}_like" for name in ("empty", "full", "ones", "rand", "randn", "zeros")}
    | {f"aten::new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
)
"""Operations that look at a tensor's shape and format, and not at its values."""


def add_values(
    model: nn.Module,
    trace: Trace,
    ranges: Sequence[StageRange],
    crossings: Sequence[Crossing],
    is_held: Callable[[int, str], bool],
    batch: Any,
) -> tuple[tuple[Crossing, ...], dict[str, frozenset[int]]]:
    """Return what each stage gets from the one before, with values that have no gradient, and what need not be run.

    Args:
        model: The user's model, whole.
        trace: What a dry run of it has seen.
        ranges: The layers of each stage.
        crossings: What each stage gets that has a gradient.
        is_held: Tells by stage and name whether a parameter is there, and used in its place.
        batch: As its data loader yields it.

    Returns:
        The crossings; and the stages on which a module outside of the layers has nothing to compute, by its name.

    Raises:
        ConfigError: If a stage needs a value that is not an argument of its first layer; with the layer that makes it.
    """
    modules = dict(model.named_modules())
    found: tuple[Crossing, ...] = ()
    sources: dict[str, set[int]] = {}
    idle: dict[str, frozenset[int]] = {}
    seen: dict[str, frozenset[int]] = {}

    def run(make: Callable[[Tensor], Tensor], example: Any) -> None:
        tensors = stand_ins(model, make)
        values = _Values(type(model).__name__, trace, ranges, crossings, sources, idle)
        for name, _ in model.named_parameters():
            missing = [stage.index for stage in ranges if not is_held(stage.index, name)]
            values.labels.put(tensors[name], dict.fromkeys(missing, f"parameter '{name}'"))
        with values.watching(modules), values.labels:
            output = call_on(model, tensors, example)
        values.end(output)
        nonlocal found, seen
        found, seen = tuple(values.crossings), values.idle.found()

    may_idle = True
    while True:
        try:
            run_dry(model, batch, run, FixedDraws())
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
            added = set(range(has[0] + 1, error.stage + 1)) if name in modules and name and has else set()
            if added <= sources.get(name, set()):
                raise ConfigError(str(error)) from None
            sources.setdefault(name, set()).update(added)
        else:
            if idle or not (seen and may_idle):
                return found, idle
            idle = seen  # which is right if nothing else of what these modules make is used there


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


class _Labels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The label of each storage: stages on which its values are not those of one process, each with who made them so.

    Args:
        on_read: Called with the label of a tensor whose values are read.

    Attributes:
        made_here: Label of all that is made now; that of a layer's inside.
    """

    supports_higher_order_operators = True

    def __init__(self, on_read: Callable[[_Label], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The reference keeps the address of a storage that is gone from being used again, and not its memory.
        self._known: dict[int, tuple[StorageWeakRef, _Label]] = {}
        self._on_read = on_read
        self.made_here: _Label = {}

    def of(self, tensor: Tensor) -> _Label:
        """Return a tensor's label."""
        key = storage_key(tensor)
        found = None if key is None else self._known.get(key)
        return {} if found is None else found[1]

    def put(self, tensor: Tensor, label: _Label) -> None:
        """Give a tensor's storage a label."""
        key = storage_key(tensor)
        if key is not None and label:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._known[key] = (reference, label)
        elif key is not None:
            self._known.pop(key, None)

    def copy(self, tensor: Tensor, without: Collection[int] = (), more: _Label | None = None) -> Tensor:
        """Return a copy of a tensor with another label; other uses of the tensor keep theirs."""
        label = {stage: origin for stage, origin in self.of(tensor).items() if stage not in without}
        copied = tensor.clone()
        self.put(copied, {**label, **(more or {})})
        return copied

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, and label what it makes."""
        del types
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        label: dict[int, str] = {}
        for tensor in inputs:
            label.update(self.of(tensor))
        if func in _READS:
            self._on_read(label)
        label.update(self.made_here)
        keys = {storage_key(tensor) for tensor in inputs}
        output = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.name in _FORMS:
            label = dict(self.made_here)
        if schema is not None and schema.is_mutable:
            for tensor in written_by(schema, args, kwargs):
                self.put(tensor, {**label, **self.of(tensor)})
        for leaf in pytree.tree_leaves(output):
            # A view has the label of what it shows.
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in keys:
                self.put(leaf, label)
        return output


class _Values:
    """The labels of one dry run, at the places where stages begin, end and exchange something."""

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
        self._sources = sources
        self.labels = _Labels(self._on_read)
        self.idle = IdleModules(self.labels, idle, lambda: (self._num_calls, self._inside))
        self._num_calls = 0
        self._inside: int | None = None
        self._num_returns: Counter[str] = Counter()

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch the calls of layers, and of modules whose outputs are sent."""
        senders = {*self._sources, *(extra.module for crossing in self.crossings for extra in crossing.extras)}
        with contextlib.ExitStack() as stack:
            for position, layer in enumerate(self._trace.layers):
                call = functools.partial(self._call_layer, position)
                stack.callback(replace_forward(modules[layer.name], call))
            for name in senders:
                hook = functools.partial(self._on_return, name)
                stack.callback(modules[name].register_forward_hook(hook, prepend=True).remove)
            self.idle.watch(modules, {layer.name for layer in self._trace.layers}, senders, stack)
            yield

    def end(self, output: Any) -> None:
        """Look at what the model returned."""
        for path, tensor in tensors_of(output):
            self._check(len(self._ranges) - 1, tensor, f"output {path or '(all)'}")

    def _call_layer(
        self,
        position: int,
        forward: Callable[..., Any],
        signature: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        names = ArgumentNames(signature)
        arguments = names.tensors(args, kwargs)
        for stage in self._ranges:
            if stage.first == position:
                self._send_more(stage, arguments)
        received = self._received(position)
        for stage in self._ranges[:-1]:
            if stage.last == position:
                for name in self.crossings[stage.index + 1].carried:
                    if name in arguments and name not in received.get(stage.index, ()):
                        what = f"argument '{name}' of layer '{self._trace.layers[position].name}'"
                        self._check(stage.index, arguments[name], what)
        running = {stage.index for stage in self._ranges if stage.first <= position < stage.last}
        gates: dict[str, Tensor] = {}
        for index in running & received.keys():
            for name in received[index] & arguments.keys():
                gates[name] = self.labels.copy(arguments[name], [index])
        before = self.labels.made_here, self._inside
        self._num_calls, self._inside = self._num_calls + 1, position
        later = [stage.index for stage in self._ranges if stage.first > position]
        self.labels.made_here = dict.fromkeys(later, f"layer '{self._trace.layers[position].name}'")
        try:
            args, kwargs = names.replaced(args, kwargs, gates, f"layer '{self._trace.layers[position].name}'")
            output = forward(*args, **kwargs)
            # What a layer returns is not there on later stages, even where it is what the layer was given.
            made = self.labels.made_here
            return pytree.tree_map_only(torch.Tensor, lambda tensor: self.labels.copy(tensor, more=made), output)
        finally:
            self.labels.made_here, self._inside = before

    def _on_return(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        """Take the label of those stages off that get what a module returned."""
        call = self._num_returns[name]
        self._num_returns[name] += 1
        leaves, form = leaves_by_path(output)
        values = []
        for key, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and name in self._sources:
                self._send_return(Extra(name, call, key, self._num_calls))
            getting = [index for index, each in enumerate(self.crossings) if _holds(each.extras, name, call, key)]
            if isinstance(leaf, torch.Tensor) and getting:
                self._check_sent(leaf, getting, f"what module '{name}' returns")
                values.append(self.labels.copy(leaf, getting))
            else:
                values.append(leaf)
        return pytree.tree_unflatten(values, form)

    def _send_return(self, extra: Extra) -> None:
        """Let the stages that need it be sent what a module returned."""
        for index in self._sources[extra.module]:
            crossing = self.crossings[index]
            if extra.position <= self._ranges[index].first and not _holds(
                crossing.extras, extra.module, extra.call, extra.path
            ):
                self.crossings[index] = dataclasses.replace(crossing, extras=(*crossing.extras, extra))

    def _send_more(self, stage: StageRange, arguments: Mapping[str, Tensor]) -> None:
        """Let a stage be sent those arguments of its first layer that it can't compute by itself."""
        crossing = self.crossings[stage.index]
        more = [
            name for name, value in arguments.items() if not is_carried(value) and stage.index in self.labels.of(value)
        ]
        self.crossings[stage.index] = dataclasses.replace(crossing, carried=(*crossing.carried, *more))

    def _check_sent(self, tensor: Tensor, getting: Sequence[int], what: str) -> None:
        """Look at a module's output on the first stage that sends it."""
        for index in getting:
            if index - 1 not in getting:
                self._check(index - 1, tensor, what)

    def _received(self, position: int) -> dict[int, set[str]]:
        """Return which of a layer's arguments each stage replaces by what it has received."""
        found = {}
        for stage in self._ranges[1:]:
            if stage.first <= position <= stage.last:
                sent = {*self.crossings[stage.index].carried}
                found[stage.index] = given_names(self._trace, stage, position, sent) & sent
        return found

    def _on_read(self, label: _Label) -> None:
        """Refuse code that reads values which are not there on a stage that runs it."""
        for index in sorted(label.keys() - self.idle.now()):
            stage = self._ranges[index]
            runs = self._num_calls <= stage.last if self._inside is None else stage.first <= self._inside < stage.last
            if runs:
                raise self._error(index, "a value that forward reads (as by `.item()` or `if`)", label[index])

    def _check(self, index: int, tensor: Tensor, what: str) -> None:
        label = self.labels.of(tensor)
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


def _holds(extras: Sequence[Extra], module: str, call: int, path: str) -> bool:
    return any((extra.module, extra.call, extra.path) == (module, call, path) for extra in extras)
