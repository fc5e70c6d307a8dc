"""Writes in place that a cut model can't make as one process does: `boost` refuses them.

A stage runs its own layers, and the model's code outside of layers up to its end. Neither may write to a parameter that
the stage lacks, nor in training to what backward still uses: to parameters while other microbatches are on their way,
or to what was received, which is a leaf of the stage's graph. What a module returns is sent at the end of the stage:
if it is written to before, the next stage repeats the write on what has it already. Training and evaluation are both
looked at, as some models write in one of them alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.arguments import ArgumentNames
from booster_hybrid.pipeline.cut import given_names
from booster_hybrid.pipeline.skipped_layers import FixedDraws
from booster_hybrid.pipeline.trace import call_on, copy_of, replace_forward, run_dry, stand_ins
from booster_runtime.data import leaves_by_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_hybrid.pipeline.cut import StageRange
    from booster_hybrid.pipeline.flow import Crossing
    from booster_hybrid.pipeline.trace import Trace


def check_writes(
    model: nn.Module,
    trace: Trace,
    ranges: Sequence[StageRange],
    crossings: Sequence[Crossing],
    idle: Mapping[str, Collection[int]],
    is_held: Callable[[int, str], bool],
    batch: Any,
    *,
    trains: bool,
) -> None:
    """Raise if a stage writes to what it receives or lacks, in training or in evaluation.

    Args:
        model: The user's model, whole; its modes and attributes stay as they are.
        trace: What a dry run of it has seen.
        ranges: The layers of each stage.
        crossings: What each stage gets from the one before.
        idle: The stages on which a module outside of the layers is not run, by its name.
        is_held: Tells by stage and name whether a parameter is there, and used in its place.
        batch: As its data loader yields it.
        trains: Whether there will be a backward.

    Raises:
        ConfigError: If so, naming the parameter or value.
    """
    for mode in (True, False):
        try:
            other = copy_of(model)
        except Exception:  # noqa: BLE001 - whatever a user's object raises when it is copied
            return  # the first step that writes so raises then
        for module in other.modules():
            module.training = mode  # some models' `train` changes parameters, which are shared
        found: list[ConfigError] = []

        def run(
            make: Callable[[Tensor], Tensor], example: Any, other: nn.Module = other, found: list[ConfigError] = found
        ) -> None:
            tensors = stand_ins(other, make)
            what = type(other).__name__
            writes = _Writes(what, trace, ranges, crossings, found, is_training=other.training, trains=trains)
            for name, _ in other.named_parameters():
                missing = [stage.index for stage in ranges if not is_held(stage.index, name)]
                writes.watch_parameter(tensors[name], name, missing)
            with writes.watching(dict(other.named_modules()), idle), writes:
                call_on(other, tensors, example)

        with contextlib.suppress(Exception):  # of a mode that fails on the batch, that mode tells
            run_dry(other, batch, run, FixedDraws())
        if found:
            raise found[0]


def storage_key(tensor: Tensor) -> int | None:
    """Return what tells a tensor's storage from others that exist; ``None`` where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as torch tells storages apart
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors have no storage


def written_by(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, given its schema and arguments."""
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


class _StopError(ConfigError):
    """Ends a dry run that has found an error, or would write to a parameter's own memory."""


@dataclass(frozen=True)
class _Watched:
    """A storage that some stages can't write to.

    Args:
        reference: Keeps the address of a storage that is gone from being used again, and not its memory.
        what: What it holds.
        stages: The stages.
        is_parameter: Whether that is a parameter.
        is_sent: Whether it is what a module returns, which the stage before sends when it ends.
        is_kept: Whether backward uses it.
    """

    reference: StorageWeakRef
    what: str
    stages: Collection[int]
    is_parameter: bool
    is_sent: bool
    is_kept: bool


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the storages of parameters, and of what stages receive, in a dry run.

    Args:
        model: What the model is called in errors.
        trace: What a dry run of it has seen.
        ranges: The layers of each stage.
        crossings: What each stage gets from the one before.
        found: Where errors are put.
        is_training: Whether the model is in training mode.
        trains: Whether there will be a backward.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: str,
        trace: Trace,
        ranges: Sequence[StageRange],
        crossings: Sequence[Crossing],
        found: list[ConfigError],
        *,
        is_training: bool,
        trains: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._trace, self._ranges, self._crossings = model, trace, ranges, crossings
        self._found, self._is_training, self._has_backward = found, is_training, is_training and trains
        self._watched: dict[int, _Watched] = {}
        self._num_calls = 0
        self._inside: int | None = None
        self._num_returns: Counter[str] = Counter()
        self._idle: list[Collection[int]] = []

    def watch_parameter(self, tensor: Tensor, name: str, missing: Collection[int]) -> None:
        """Watch a parameter that some stages lack."""
        self._watch(tensor, f"parameter '{name}'", missing, is_parameter=True)

    def _watch(
        self, tensor: Tensor, what: str, stages: Collection[int], *, is_parameter: bool = False, is_sent: bool = False
    ) -> None:
        key = storage_key(tensor)
        if key is not None:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            is_kept = self._has_backward and (is_parameter or tensor.requires_grad)
            self._watched[key] = _Watched(reference, what, stages, is_parameter, is_sent, is_kept)

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module], idle: Mapping[str, Collection[int]]) -> Iterator[None]:
        """Watch the calls of layers, of modules whose outputs are sent, and of those that stages don't run."""
        with contextlib.ExitStack() as stack:
            for position, layer in enumerate(self._trace.layers):
                call = functools.partial(self._call_layer, position)
                stack.callback(replace_forward(modules[layer.name], call))
            for name in {extra.module for crossing in self._crossings for extra in crossing.extras}:
                hook = functools.partial(self._on_return, name)
                stack.callback(modules[name].register_forward_hook(hook, prepend=True).remove)
            for name, stages in idle.items():
                enter = functools.partial(self._enter_idle, stages)
                stack.callback(modules[name].register_forward_pre_hook(enter).remove)
                stack.callback(modules[name].register_forward_hook(self._leave_idle, prepend=True).remove)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, unless it writes to what it must not."""
        del types
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in written_by(schema, args, kwargs):
                self._on_write(tensor, schema.name.rpartition(":")[2])
        return func(*args, **kwargs)

    def _on_write(self, tensor: Tensor, operation: str) -> None:
        watched = self._watched.get(storage_key(tensor) or 0)
        if watched is None:
            return
        stages = [self._ranges[index] for index in sorted(watched.stages)]
        stage = next((each for each in stages if self._is_wrong(watched, each)), None)
        if stage is not None or (watched.is_parameter and watched.is_kept):
            self._found.append(self._error(watched, stage, operation))
            raise _StopError(watched.what)
        if watched.is_parameter and not isinstance(tensor, FakeTensor):
            raise _StopError(watched.what)

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

    def _call_layer(
        self,
        position: int,
        forward: Callable[..., Any],
        signature: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        names = ArgumentNames(signature)
        layer = self._trace.layers[position].name
        stage = next(each for each in self._ranges if each.first <= position < each.last)
        sent = set() if stage.is_first else {*self._crossings[stage.index].carried}
        arguments = names.tensors(args, kwargs)
        received = {}
        for name in given_names(self._trace, stage, position, sent) & sent & arguments.keys():
            received[name] = arguments[name].clone()
            self._watch(received[name], f"argument '{name}' of layer '{layer}'", [stage.index])
        args, kwargs = names.replaced(args, kwargs, received, f"layer '{layer}'")
        before = self._inside
        self._num_calls, self._inside = self._num_calls + 1, position
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = before

    def _on_return(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        """Watch what stages get of what a module returned."""
        call = self._num_returns[name]
        self._num_returns[name] += 1
        leaves, form = leaves_by_path(output)
        values = []
        for path, leaf in leaves:
            getting = [
                index
                for index, crossing in enumerate(self._crossings)
                if any((each.module, each.call, each.path) == (name, call, path) for each in crossing.extras)
            ]
            values.append(leaf.clone() if isinstance(leaf, torch.Tensor) and getting else leaf)
            if values[-1] is not leaf:
                self._watch(values[-1], f"what module '{name}' returns", getting, is_sent=True)
        return pytree.tree_unflatten(values, form)

    def _enter_idle(self, stages: Collection[int], *_: Any) -> None:
        self._idle.append(stages)

    def _leave_idle(self, *_: Any) -> None:
        self._idle.pop()
