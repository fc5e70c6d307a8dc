"""A recording of a model's forward on fake tensors, from which follows what stages need, leave out and must not write.

It is a list of steps: what each operation reads, makes and writes, by memory; and where layers and other modules were
called and have returned. Whatever is asked about stages is a walk over these steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_plain
from booster_hybrid.pipeline.arguments import ArgumentNames
from booster_hybrid.pipeline.microbatches import count_samples, doubled
from booster_hybrid.pipeline.trace import (
    call_on,
    copy_of,
    is_carried,
    is_inside,
    replace_forward,
    run_dry,
    stand_ins,
)
from booster_hybrid.skipped_layers import FixedDraws
from booster_runtime.data import leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor, nn

    from booster_hybrid.pipeline.trace import Trace

Memory: TypeAlias = "int | None"
"""What tells the memory of one tensor from that of others; ``None`` for a sparse tensor, which has none of its own."""
_READS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}  # noqa: SLF001 - what `item` calls
)
"""Operations that turn a tensor's values into Python's."""
_FORMS = frozenset(
    {f"aten::{name}_like" for name in ("empty", "full", "ones", "rand", "randn", "zeros")}
    | {f"aten::new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
)
"""Operations that look at a tensor's shape and format, and not at its values."""
_NOT_STATE = frozenset({"_parameters", "_buffers", "_modules", "forward"})


@dataclass(frozen=True)
class Operation:
    """A step that computes.

    Args:
        name: The operation's name.
        used: The memory whose values it depends on.
        arguments: For each of these, which argument of a layer it is; see `LayerCall`.
        made: New memory that it returns.
        written: Memory that it changes.
        is_read: Whether it turns values into Python's.
    """

    name: str
    used: tuple[Memory, ...]
    arguments: tuple[int | None, ...]
    made: tuple[Memory, ...]
    written: tuple[Memory, ...]
    is_read: bool


@dataclass(frozen=True)
class LayerCall:
    """A layer begins.

    Args:
        position: The layer, in the order of the trace.
        arguments: The memory of its arguments by path.
        objects: What tells each of these tensors from others that show the same memory.
        carried: Paths of those that have a gradient.
    """

    position: int
    arguments: Mapping[str, Memory]
    objects: Mapping[str, int]
    carried: frozenset[str]


@dataclass(frozen=True)
class LayerReturn:
    """A layer ends.

    Args:
        copies: The memory of each tensor that it returned, and that of the copy which the model goes on with.
    """

    copies: tuple[tuple[Memory, Memory], ...]


@dataclass(frozen=True)
class ModuleCall:
    """A module outside of the layers begins.

    Args:
        name: The module.
    """

    name: str


@dataclass(frozen=True)
class ModuleReturn:
    """A module outside of the layers ends.

    Args:
        name: The module.
        returned: The memory of the tensors that it returned, and which argument of a layer each is.
        is_pure: Whether it did nothing but return tensors: no layer ran, and nothing was kept or written.
    """

    name: str
    returned: tuple[tuple[Memory, int | None], ...]
    is_pure: bool


@dataclass(frozen=True)
class SenderReturn:
    """A module returned whose output may be sent.

    Args:
        name: The module.
        call: Which of its calls it was.
        tensors: The path of each tensor, its memory, and that of the copy which the model goes on with.
        carried: Paths of those that have a gradient.
    """

    name: str
    call: int
    tensors: tuple[tuple[str, Memory, Memory], ...]
    carried: frozenset[str]


Step: TypeAlias = Operation | LayerCall | LayerReturn | ModuleCall | ModuleReturn | SenderReturn


@dataclass(frozen=True)
class Recording:
    """One forward.

    Args:
        is_training: Whether all modules were in training mode; ``None`` if some were.
        parameters: The memory of each parameter.
        senders: Names of the modules whose outputs may be sent.
        steps: What it did.
        results: The path and memory of each tensor that the model returned, and which argument of a layer it is.
        shapes: The shapes of these by path.
    """

    is_training: bool | None
    parameters: Mapping[str, Memory]
    senders: frozenset[str]
    steps: list[Step] = field(default_factory=list, repr=False)
    results: list[tuple[str, Memory, int | None]] = field(default_factory=list, repr=False)
    shapes: dict[str, torch.Size] = field(default_factory=dict, repr=False)


def record(model: nn.Module, trace: Trace, senders: Collection[str], batch: Any) -> list[Recording]:
    """Run a model dry, and return what it did in each try; the last one came to the end.

    Args:
        model: The whole model.
        trace: What a dry run of it has seen.
        senders: Names of the modules whose outputs may be sent.
        batch: As its data loader yields it.
    """
    found: list[Recording] = []
    _record(model, trace, senders, batch, found)
    return found


def record_other(model: nn.Module, trace: Trace, senders: Collection[str], batch: Any) -> list[Recording]:
    """Return what a model does that is in another mode than the user's, as far as it gets there.

    Args:
        model: As for `record`.
        trace: Likewise.
        senders: Likewise.
        batch: Likewise.
    """
    found: list[Recording] = []
    with contextlib.suppress(Exception):  # of a mode that fails on the batch, that mode tells
        _record(model, trace, senders, batch, found)
    return found


def copy_in_mode(model: nn.Module, *, is_training: bool) -> nn.Module | None:
    """Return a copy of a model in one mode; ``None`` if it can't be copied."""
    with contextlib.suppress(Exception):
        other = copy_of(model)
        for module in other.modules():
            module.training = is_training  # some models' `train` changes parameters, which are shared
        return other
    return None


def sample_dims(model: nn.Module, batch: Any, shapes: Mapping[str, torch.Size]) -> dict[str, int | None]:
    """Return along which dimension outputs have an entry per sample, ``None`` for those that have none.

    Where it is not the first one, a dry run of twice as many samples tells. Outputs of which it can't be told are left
    out.

    Args:
        model: The whole model.
        batch: What was recorded.
        shapes: Of the outputs then, by path.
    """
    try:
        count = count_samples(batch)
    except ConfigError:  # it is not split into microbatches either
        return {}
    found = {path: 0 if shape else None for path, shape in shapes.items() if not shape or shape[0] == count > 1}
    if len(found) == len(shapes):
        return found
    larger: dict[str, torch.Size] = {}

    def run(make: Callable[[Tensor], Tensor], example: Any) -> None:
        output = call_on(model, stand_ins(model, make), example)
        larger.update((path, tensor.shape) for path, tensor in tensors_of(output))

    with contextlib.suppress(Exception):  # a model for one number of samples
        run_dry(model, doubled(batch), run, FixedDraws())
    for path in larger.keys() & shapes.keys() - found.keys():
        pairs = list(zip(shapes[path], larger[path], strict=False))
        differ = [dim for dim, (one, two) in enumerate(pairs) if one != two]
        if not differ:
            found[path] = None
        elif len(differ) == 1 and not (one := pairs[differ[0]][0]) % count and pairs[differ[0]][1] == 2 * one:
            found[path] = differ[0]  # several for each sample, such as the states of an image's patches
    return found


def _record(model: nn.Module, trace: Trace, senders: Collection[str], batch: Any, found: list[Recording]) -> None:
    """Add what each try of a run did to a list."""
    modes = {module.training for module in model.modules()}
    is_training = modes.pop() if len(modes) == 1 else None

    def run(make: Callable[[Tensor], Tensor], example: Any) -> None:
        tensors = stand_ins(model, make)
        parameters = {name: memory_of(tensors[name]) for name, _ in model.named_parameters()}
        found.append(Recording(is_training, parameters, frozenset(senders)))
        recorder = _Recorder(found[-1], tensors)
        with recorder.watching(dict(model.named_modules()), trace), recorder:
            output = call_on(model, tensors, example)
        found[-1].results.extend((path, *recorder.both(tensor)) for path, tensor in tensors_of(output))
        found[-1].shapes.update((path, tensor.shape) for path, tensor in tensors_of(output))

    run_dry(model, batch, run, FixedDraws())


def memory_of(tensor: Tensor) -> Memory:
    """Return what tells a tensor's memory from others that exist."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as torch tells storages apart
    except (NotImplementedError, RuntimeError):
        return None


def _written_by(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the steps of one run.

    Args:
        recording: Where.
        tensors: What stands for the model's parameters and buffers.
    """

    supports_higher_order_operators = True

    def __init__(self, recording: Recording, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps, self._senders = recording.steps, recording.senders
        # Memory that is gone keeps its address to itself, and no values.
        self._seen: dict[int, StorageWeakRef] = {}
        self._real_parameters = {
            memory
            for name, memory in recording.parameters.items()
            if not isinstance(tensors[name], FakeTensor) and memory is not None
        }
        self._num_calls = 0
        self._inside: int | None = None
        self._num_returns: Counter[str] = Counter()
        self._before: list[Any] = []
        self._arguments: dict[int, Tensor] = {}  # keeps the ids in use

    def memory(self, tensor: Tensor) -> Memory:
        """Return what tells a tensor's memory from all others of the run."""
        memory = memory_of(tensor)
        if memory is not None and memory not in self._seen:
            self._seen[memory] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return memory

    def both(self, tensor: Tensor) -> tuple[Memory, int | None]:
        """Return what tells a tensor's memory, and which argument of a layer it is, if any."""
        return self.memory(tensor), id(tensor) if id(tensor) in self._arguments else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, and note it."""
        del types
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        given = [self.both(each) for each in _tensors((args, kwargs))]
        used = tuple(memory for memory, _ in given)
        schema = getattr(func, "_schema", None)
        written: tuple[Memory, ...] = ()
        if schema is not None and schema.is_mutable:
            written = tuple(map(self.memory, _written_by(schema, args, kwargs)))
        name = str(func) if schema is None else schema.name
        # The user's own parameters are not written to.
        output = func(*args, **kwargs) if self._real_parameters.isdisjoint(written) else args[0]
        # A view is of what it shows.
        made = tuple(memory for each in _tensors(output) if (memory := self.memory(each)) not in used)
        if used or made or written:
            depends = [] if name in _FORMS else given
            memories, arguments = (memory for memory, _ in depends), (argument for _, argument in depends)
            self._steps.append(Operation(name, tuple(memories), tuple(arguments), made, written, func in _READS))
        return output

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module], trace: Trace) -> Iterator[None]:
        """Watch the calls of layers, of modules whose outputs may be sent, and of all others outside of the layers."""
        names = {layer.name for layer in trace.layers}
        with contextlib.ExitStack() as stack:
            for position, layer in enumerate(trace.layers):
                call = functools.partial(self._call_layer, position)
                stack.callback(replace_forward(modules[layer.name], call))
            for name in self._senders:
                hook = functools.partial(self._on_return, name)
                stack.callback(modules[name].register_forward_hook(hook, prepend=True).remove)
            around = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
            for name, module in modules.items():
                if name and name not in names and name not in around and not is_inside(name, names):
                    enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
                    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(leave, prepend=True, with_kwargs=True).remove)
            yield

    def _copied(self, tensor: Tensor) -> tuple[Tensor, tuple[Memory, Memory]]:
        copied = tensor.clone()
        return copied, (self.memory(tensor), self.memory(copied))

    def _call_layer(
        self,
        position: int,
        forward: Callable[..., Any],
        signature: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tensors = ArgumentNames(signature).tensors(args, kwargs)
        carried = frozenset(path for path, tensor in tensors.items() if is_carried(tensor))
        self._arguments.update((id(each), each) for each in tensors.values())
        memories = {path: self.memory(each) for path, each in tensors.items()}
        objects = {path: id(each) for path, each in tensors.items()}
        self._steps.append(LayerCall(position, memories, objects, carried))
        before = self._inside
        self._num_calls, self._inside = self._num_calls + 1, position
        copies: list[tuple[Memory, Memory]] = []

        def copied(tensor: Tensor) -> Tensor:
            copy, memories = self._copied(tensor)
            copies.append(memories)
            return copy

        try:
            return pytree.tree_map_only(torch.Tensor, copied, forward(*args, **kwargs))
        finally:
            self._inside = before
            self._steps.append(LayerReturn(tuple(copies)))

    def _on_return(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        call = self._num_returns[name]
        self._num_returns[name] += 1
        leaves, form = leaves_by_path(output)
        values, tensors = [], []
        for path, leaf in leaves:
            copy = leaf
            if isinstance(leaf, torch.Tensor):
                copy, memories = self._copied(leaf)
                tensors.append((path, *memories))
            values.append(copy)
        carried = frozenset(path for path, leaf in leaves if is_carried(leaf))
        self._steps.append(SenderReturn(name, call, tuple(tensors), carried))
        return pytree.tree_unflatten(values, form)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._before.append(self._state(module, args, kwargs))
        self._steps.append(ModuleCall(name))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before, after = self._before.pop(), self._state(module, args, kwargs)
        results = pytree.tree_leaves(output)
        is_pure = before == after and all(map(is_plain, (*pytree.tree_leaves((args, kwargs)), *results)))
        returned = tuple(self.both(each) for each in results if isinstance(each, torch.Tensor))
        self._steps.append(ModuleReturn(name, returned, is_pure and bool(returned)))

    def _state(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a call may change, to be compared: layers' calls, tensors that it is given, and attributes."""
        leaves = pytree.tree_leaves((args, kwargs))
        versions = [each._version for each in leaves if isinstance(each, torch.Tensor)]  # noqa: SLF001 - no other way
        attributes = [
            (name, id(value))
            for each in module.modules()
            for name, value in vars(each).items()
            if name not in _NOT_STATE
        ]
        return self._num_calls, self._inside, versions, attributes


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in what an operation takes or returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return (
        [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        if isinstance(value, dict)
        else []
    )
