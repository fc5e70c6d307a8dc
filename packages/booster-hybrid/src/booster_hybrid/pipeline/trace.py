"""A dry run of a model on fake tensors: the order of its layers, what they return, and what is used where.

No number is computed, so it costs a fraction of a second for any size. Where a model's forward reads values (a mixture
of experts that loops over the experts that were hit), the dry run computes them after all.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import call_with_tensors
from booster_hybrid.pipeline.absent import Form, absent_like, quiet_fakes
from booster_hybrid.pipeline.arguments import ArgumentNames, LikeArguments
from booster_hybrid.pipeline.fakes import Fakes
from booster_hybrid.pipeline.flow import Flow
from booster_hybrid.skipped_layers import FixedDraws, host_states
from booster_hybrid.tensor_parallel.split import is_repeated
from booster_runtime.data import call_with, hides_tensors, named_forward, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose members may be layers."""
_MISSING = object()
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, where its tensors and hooks are."""


@dataclass(frozen=True)
class Kept:
    """An attribute or buffer with tensors that a layer writes while it runs.

    Args:
        module: Name of the module that has it, in the model.
        name: The attribute's.
        value: What it is then, with forms in place of tensors: leaves, and how to put them together.
    """

    module: str
    name: str
    value: tuple[list[Any], Any] = field(repr=False)

    def absent(self, layer: str) -> Any:
        """Return what it is where the layer is not run."""
        leaves, form = self.value
        origin = f"what layer '{layer}' writes into '{self.module}.{self.name}'"
        return pytree.tree_unflatten(
            [absent_like(leaf, origin) if isinstance(leaf, Form) else leaf for leaf in leaves], form
        )


@dataclass(frozen=True)
class Layer:
    """A layer between whose calls the model may be cut.

    Args:
        name: Its name in the model.
        returned: What stands for its output on stages that do not run it.
        carried: Paths of its arguments that are differentiable tensors: what a stage before it has to send.
        kept: What it leaves in its modules, which code after it may read.
    """

    name: str
    returned: LikeArguments
    carried: tuple[str, ...]
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What a dry run has seen.

    Args:
        layers: The layers in the order of their calls.
        uses: For each other module that has parameters of its own: the numbers of layers that had been called while it
            ran. A module that was not called has none.
        uncalled: Names of the layers that were not called.
        is_certain: Whether these layers are called in training whatever is drawn: no single number was, and no value
            was looked at.
    """

    layers: tuple[Layer, ...]
    uses: Mapping[str, tuple[int, ...]] = field(repr=False)
    uncalled: tuple[str, ...] = ()
    is_certain: bool = False


def is_carried(value: Any) -> bool:
    """Return whether an argument has to come from the stage before: it has a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_plain_output(output: Any) -> bool:
    """Return whether a layer returned a tensor, or a plain tuple that begins with one."""
    return isinstance(output[0] if type(output) is tuple and output else output, torch.Tensor)


def members(modules: Mapping[str, nn.Module], names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the members of some lists of layers by name; lists that a model lacks are passed over.

    Args:
        modules: The model's modules by name.
        names: Names of a `ModuleList`, `ModuleDict` or `Sequential` each; ``""`` is the model itself.
    """
    found = [name for name in names if isinstance(modules.get(name), CONTAINERS)]
    return {
        f"{name}.{key}" if name else key: module for name in found for key, module in modules[name].named_children()
    }


def shown_output(output: Any) -> str:
    """Return what a layer returned, for messages."""
    first = f" that begins with `{type(output[0]).__name__}`" if type(output) is tuple and output else ""
    return f"`{type(output).__name__}`{first}"


def trace_layers(model: nn.Module, lists: Sequence[str], batch: Any) -> Trace:
    """Run a model dry, and return what is seen of its layers; see `trace_flow`."""
    return trace_flow(model, lists, batch)[0]


def trace_flow(
    model: nn.Module, lists: Sequence[str], batch: Any, draws: FixedDraws | None = None
) -> tuple[Trace, Flow]:
    """Run a model dry.

    Args:
        model: The whole model.
        lists: Names of its lists of layers; those that it lacks are passed over.
        batch: As its data loader yields it; see `call_with` and `taken_by`.
        draws: What single random numbers are; by default so high that no layer is skipped by chance.

    Returns:
        What is seen of its layers, and the graph of what was computed.

    Raises:
        ConfigError: If there is no list of layers, a layer is called more than once, or what it returns is no tensor
            or tuple.
    """
    modules = dict(model.named_modules())
    found = members(modules, lists)
    if not found:
        msg = (
            f"The policy of {type(model).__name__} cuts a pipeline at the lists of layers "
            f"{', '.join(map(repr, lists)) or '(none given)'}, of which the model has none. Name a ModuleList, "
            "ModuleDict or Sequential in `ShardingPolicy(layers=...)`."
        )
        raise ConfigError(msg)
    recorder = _Recorder(modules, {id(layer): name for name, layer in found.items()})
    recorder.watch()
    before, draws = host_states(), draws or FixedDraws()
    try:
        is_fake = run_dry(model, batch, functools.partial(_run_recorded, model, recorder), draws)
    finally:
        recorder.close()
    assert recorder.flow is not None, "the model has run"
    is_certain = model.training and is_fake and not draws.count and host_states() == before
    return dataclasses.replace(recorder.trace(), is_certain=is_certain), recorder.flow


def replace_forward(module: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """Watch a layer from where a gate of a stage would stand: inside of what hooks see.

    Args:
        module: The layer.
        call: Called with its forward, the function whose arguments have names, and the call's arguments.

    Returns:
        What puts the forward back.
    """
    before, forward = module.__dict__.get("forward"), module.forward
    signature = named_forward(module)

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(forward, signature, args, kwargs)

    functools.update_wrapper(called, signature.func if isinstance(signature, functools.partial) else signature)
    called.__signature__ = inspect.signature(signature)  # type: ignore[attr-defined]
    module.forward = called

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward")
        else:
            module.forward = before

    return undo


class _Recorder:
    def __init__(self, modules: Mapping[str, nn.Module], layers: Mapping[int, str]) -> None:
        self._modules, self._layers = modules, layers
        self._undo: list[Callable[[], None]] = []
        self._calls: list[tuple[str, dict[str, torch.Tensor]]] = []
        self._returned: dict[str, LikeArguments] = {}
        self._kept: dict[str, tuple[Kept, ...]] = {}
        self._uses: dict[str, list[int]] = {}
        self._num_returns: Counter[str] = Counter()
        self._entered: list[int] = []
        self._depth = 0
        self.flow: Flow | None = None

    def watch(self) -> None:
        names = {*self._layers.values()}
        for name, module in self._modules.items():
            if id(module) in self._layers:
                call = functools.partial(self._call_layer, self._layers[id(module)])
                self._undo.append(replace_forward(module, call))
            elif is_inside(name, names):
                self._undo.append(module.register_forward_hook(functools.partial(self._on_inner_return, name)).remove)
                continue
            elif any(True for _ in module.parameters(recurse=False)):
                self._uses[name] = []
            on_return = functools.partial(self._on_return, name)
            self._undo += [
                module.register_forward_pre_hook(self._on_call).remove,
                module.register_forward_hook(lambda _, __, output, then=on_return: then(output), prepend=True).remove,
            ]

    def close(self) -> None:
        for undo in self._undo:
            undo()

    def start(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._calls, self._returned = [], {}
        self._uses = {name: [] for name in self._uses}
        self._num_returns.clear()
        self._entered, self._depth = [], 0
        self.flow = Flow(parameters)

    def trace(self) -> Trace:
        names = [name for name, _ in self._calls]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            msg = (
                f"Layer '{repeated[0]}' is called {names.count(repeated[0])} times in one forward, so that no stage "
                "can hold it alone. Use `pp_size=1` for this model."
            )
            raise ConfigError(msg)
        layers = tuple(
            Layer(
                name,
                self._returned[name],
                tuple(key for key, value in tensors.items() if is_carried(value)),
                self._kept[name],
            )
            for name, tensors in self._calls
        )
        uses = {name: tuple(each) for name, each in self._uses.items()}
        uncalled = tuple(name for name in self._layers.values() if name not in names)
        return Trace(layers, uses, uncalled)

    def _call_layer(
        self,
        name: str,
        forward: Callable[..., Any],
        signature: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        assert self.flow is not None, "the model runs"
        names = ArgumentNames(signature)
        tensors = names.tensors(args, kwargs)
        gates = self.flow.enter_layer({key: value for key, value in tensors.items() if is_carried(value)})
        self._calls.append((name, tensors))
        self._depth += 1
        modules = {inner: module for inner, module in self._modules.items() if f"{inner}.".startswith(f"{name}.")}
        before = {key: mark for key, mark, _ in _attributes(modules)}
        try:
            args, kwargs = names.replaced(args, kwargs, gates, f"layer '{name}'")
            output = forward(*args, **kwargs)
            self._kept[name] = tuple(
                Kept(*key, _forms_of(value)) for key, mark, value in _attributes(modules) if before.get(key) != mark
            )
        finally:
            self._depth -= 1
        returned = LikeArguments.like(output, tensors)
        if returned is None:
            msg = (
                f"Layer '{name}' returns a {shown_output(output)}. Where a pipeline is cut, layers must return a "
                "tensor, or a plain tuple or list with one. Return one of these, or use `pp_size=1`."
            )
            raise ConfigError(msg)
        self._returned[name] = returned
        return output

    def _on_call(self, *_: Any) -> None:
        self._entered.append(len(self._calls))

    def _on_inner_return(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Note what hooks on a module inside of a layer see: they may hand it to code after the layers."""
        is_watched = len(module._forward_hooks) > 1  # noqa: SLF001 - torch tells it nowhere else
        if is_watched and self.flow is not None:
            if isinstance(output, tuple):
                output = tuple(each if isinstance(each, torch.Tensor) else None for each in output)
            if isinstance(output, (torch.Tensor, tuple)):
                self.flow.leave_module(name, self._num_returns[name], len(self._calls), output)
        self._num_returns[name] += 1

    def _on_return(self, name: str, output: Any) -> None:
        before, now = self._entered.pop(), len(self._calls)
        if self._depth == 0 and self.flow is not None:
            self.flow.leave_module(name, self._num_returns[name], now, output)
            self._num_returns[name] += 1
        if name in self._uses:
            # What has layers inside may use its own parameters before, between and after them.
            self._uses[name] += range(before, now + 1)


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str], list[tuple[int, int]], Any]]:
    """Yield attributes and buffers with tensors: module and name, what changes with each write, and the value."""
    for module_name, module in modules.items():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        for name, value in (*own.items(), *module._buffers.items()):  # noqa: SLF001 - without those of modules inside
            if isinstance(value, (torch.Tensor, list, tuple, dict)):
                leaves = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
                if leaves:
                    yield (module_name, name), [(id(each), each._version) for each in leaves], value  # noqa: SLF001


def _forms_of(value: Any) -> tuple[list[Any], Any]:
    leaves, form = pytree.tree_flatten(value)
    return [Form.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form


def is_inside(name: str, layers: Collection[str]) -> bool:
    """Return whether a module is a part of a layer, given its name and those of the layers."""
    while name := name.rpartition(".")[0]:
        if name in layers:
            return True
    return False


def run_dry(
    model: nn.Module, batch: Any, run: Callable[[Callable[[torch.Tensor], torch.Tensor], Any], None], draws: FixedDraws
) -> bool:
    """Run something on fake tensors; on real ones where it asks for values.

    Args:
        model: The model; entries of the batch that its forward does not take are left out.
        batch: As its data loader yields it.
        run: Called with what makes a tensor's stand-in, and the batch made of such ones; up to three times, until it
            raises nothing.
        draws: What single random numbers are meanwhile.

    Returns:
        Whether it ran on fake tensors.

    Raises:
        ConfigError: What the function refuses, at once.
        Exception: What it raised on real tensors.
    """
    batch = taken_by(model, batch)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), kept_attributes(model):
        # Some kernels' shapes are known for bf16 alone, such as those of products of groups.
        for narrow in (False, True):
            try:
                with Fakes(draws, narrow=narrow) as fakes, quiet_fakes():
                    run(fakes.like, pytree.tree_map_only(torch.Tensor, fakes.like, batch))
            except ConfigError:
                raise
            except Exception:  # noqa: BLE001, S112 - a value was asked for, which only a real run has
                continue
            return True
        with draws:
            run(torch.Tensor.detach, batch)
    return False


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put tensors back that a forward leaves in modules, as they are fake; other attributes stay as they are set.

    So are those that it adds to lists and dicts. Models note in attributes which hooks they have registered, for
    example, and hooks stay.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, kept in before
        for name, value in kept.items()
        if type(value) in (list, dict) and name not in _OF_TORCH
    ]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name, value in [*attributes.items()]:
                if value is not kept.get(name, _MISSING) and _holds_tensors(value):
                    if name in kept:
                        attributes[name] = kept[name]
                    else:
                        del attributes[name]
        for value, kept in contents:
            if _holds_tensors(value):
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(kept)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) or hides_tensors(leaf) for leaf in pytree.tree_leaves(value))


def _run_recorded(model: nn.Module, recorder: _Recorder, make: Callable[..., torch.Tensor], batch: Any) -> None:
    tensors = stand_ins(model, make)
    recorder.start({name: tensors[name] for name, _ in model.named_parameters()})
    output = call_on(model, tensors, batch)
    if recorder.flow is not None:
        recorder.flow.end(output)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters, and such buffers as have no values."""
    shared = [*model.parameters(), *(each for each in model.buffers() if is_repeated(each))]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def stand_ins(model: nn.Module, make: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in place of the model's, differentiable also where a parameter is frozen now."""
    state = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.Parameter):
            state[name] = make(tensor)
            if tensor.is_floating_point():
                state[name].requires_grad_()
        else:  # some models write to their buffers
            state[name] = make(tensor.detach().clone(memory_format=torch.contiguous_format))
    return state


def call_on(model: nn.Module, tensors: Mapping[str, torch.Tensor], batch: Any) -> Any:
    """Return what a model returns for a batch, with other tensors in the places of its own.

    Args:
        model: The model.
        tensors: As `stand_ins` returns them.
        batch: See `call_with`.
    """
    instead = {id(tensor): tensors[name] for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_tensors(model, instead, args, kwargs)

    return call_with(call, batch)
