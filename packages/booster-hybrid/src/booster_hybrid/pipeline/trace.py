"""A dry run of a model on fake tensors: its layers, their order, what they return, and what is used where.

No number is computed, so it costs a fraction of a second for any size. Where a model's forward reads values (a mixture
of experts that loops over the experts that were hit), the dry run computes them after all.

Where no policy names its lists of layers, `find_layers` does: the members of a `ModuleList`, `ModuleDict` or
`Sequential` are layers if each is called once in a forward, and what each is given depends on what the one before has
returned. So experts, heads and other branches are none. Of lists inside of each other the outermost counts, unless it
has too few members to fill all stages.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_core.state import call_with_tensors
from booster_hybrid.modules import peft_classes, prefixes
from booster_hybrid.pipeline.absent import (
    AbsentTensor,
    ActivationMeta,
    ModuleOutput,
    absent_like,
    quiet_fakes,
)
from booster_hybrid.pipeline.stage_forward import (
    OF_TORCH,
    ArgumentNames,
    LikeArguments,
    NotedCalls,
    outside_of,
    preserve_attributes,
)
from booster_hybrid.random_streams import ConstantRandomMode
from booster_hybrid.tensor_parallel.split import is_repeated
from booster_runtime.data import call_with, leaves_by_path, named_forward, taken_by, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Self


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose members may be layers."""


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
            [absent_like(leaf, origin) if isinstance(leaf, ActivationMeta) else leaf for leaf in leaves], form
        )


@dataclass(frozen=True)
class Layer:
    """A layer between whose calls the model may be cut.

    Args:
        name: Its name in the model.
        returned: What stands for its output on stages that do not run it.
        writes: Paths of its arguments to which it writes in place.
        kept: What it leaves in its modules, which code after it may read.
    """

    name: str
    returned: LikeArguments
    writes: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What a dry run has seen.

    Args:
        layers: The layers in the order of their calls.
        uses: For each other module that has parameters of its own: the numbers of layers that had been called while it
            ran. A module that was not called has none.
        uncalled: Names of the layers that were not called.
    """

    layers: tuple[Layer, ...]
    uses: Mapping[str, tuple[int, ...]] = field(repr=False)
    uncalled: tuple[str, ...] = ()


@dataclass
class WholeRun:
    """What a dry run has computed, in the fake tensors of that run.

    Args:
        arguments: The tensors that each layer was given, by path.
        outputs: What modules have returned.
        results: What the model has returned, by path.
        calls: The functions that were called outside of the layers, with the shapes that they were given; where layers
            and modules begin, and where modules end.
    """

    arguments: list[dict[str, torch.Tensor]] = field(default_factory=list)
    outputs: dict[ModuleOutput, torch.Tensor] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)


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


def trace_on(
    model: nn.Module, lists: Sequence[str], tensors: Mapping[str, torch.Tensor], batch: Any
) -> tuple[Trace, WholeRun]:
    """Run a model on stand-ins; see `run_dry`.

    Args:
        model: The whole model.
        lists: Names of its lists of layers; those that it lacks are passed over.
        tensors: What stands for its parameters and buffers.
        batch: What stands for the batch.

    Returns:
        What is seen of its layers, and what was computed.

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
    whole = WholeRun()
    run = NotedCalls(whole.calls)
    recorder = _Recorder(modules, {id(layer): name for name, layer in found.items()}, run, whole)
    recorder.watch()
    try:
        with preserve_attributes(model), run:
            output = call_on(model, tensors, batch)
    finally:
        recorder.close()
    whole.results = dict(tensors_of(output))
    return recorder.trace(), whole


def replace_forward(module: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """Watch a layer from where the `_LayerForward` of a stage would stand: inside of what hooks see.

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
    def __init__(
        self, modules: Mapping[str, nn.Module], layers: Mapping[int, str], run: NotedCalls, whole: WholeRun
    ) -> None:
        self._modules, self._layers, self._run, self._whole = modules, layers, run, whole
        self._undo: list[Callable[[], None]] = []
        self._seen: list[Layer] = []
        self._uses: dict[str, list[int]] = {}
        self._num_returns: Counter[str] = Counter()
        self._entered: list[int] = []
        self._depth = self._num_calls = 0

    def watch(self) -> None:
        names = {*self._layers.values()}
        for name, module in self._modules.items():
            if id(module) in self._layers:
                call = functools.partial(self._call_layer, self._layers[id(module)])
                self._undo.append(replace_forward(module, call))
            elif not names.isdisjoint(prefixes(name)):
                self._undo.append(module.register_forward_hook(functools.partial(self._on_inner_return, name)).remove)
                continue
            elif any(True for _ in module.parameters(recurse=False)):
                self._uses[name] = []
            on_call, on_return = functools.partial(self._on_call, name), functools.partial(self._on_return, name)
            is_layer = id(module) in self._layers
            self._undo += [
                module.register_forward_pre_hook(lambda *_, then=on_call: then(), prepend=is_layer).remove,
                module.register_forward_hook(lambda _, __, output, then=on_return: then(output), prepend=True).remove,
            ]

    def close(self) -> None:
        for undo in self._undo:
            undo()

    def trace(self) -> Trace:
        names = [layer.name for layer in self._seen]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            msg = (
                f"Layer '{repeated[0]}' is called {names.count(repeated[0])} times in one forward, so that no stage "
                "can hold it alone. Use `pp_size=1` for this model."
            )
            raise ConfigError(msg)
        uses = {name: tuple(each) for name, each in self._uses.items()}
        uncalled = tuple(name for name in self._layers.values() if name not in names)
        return Trace(tuple(self._seen), uses, uncalled)

    def _call_layer(
        self,
        name: str,
        forward: Callable[..., Any],
        signature: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tensors = ArgumentNames(signature).tensors(args, kwargs)
        self._whole.arguments.append(tensors)
        self._num_calls += 1
        modules = {inner: module for inner, module in self._modules.items() if f"{inner}.".startswith(f"{name}.")}
        before = {key: mark for key, mark, _ in _attributes(modules)}
        versions = {path: tensor._version for path, tensor in tensors.items()}  # noqa: SLF001 - torch tells it nowhere else
        self._depth += 1
        try:
            with outside_of(self._run):
                output = forward(*args, **kwargs)
        finally:
            self._depth -= 1
        returned = LikeArguments.like(output, tensors)
        if returned is None:
            msg = (
                f"Layer '{name}' returns a {shown_output(output)}. Where a pipeline is cut, layers must return a "
                "tensor, or a plain tuple or list with one. Return one of these, or use `pp_size=1`."
            )
            raise ConfigError(msg)
        writes = tuple(path for path, tensor in tensors.items() if tensor._version != versions[path])  # noqa: SLF001 - likewise
        kept = tuple(
            Kept(*key, _forms_of(value)) for key, mark, value in _attributes(modules) if before.get(key) != mark
        )
        self._seen.append(Layer(name, returned, writes, kept))
        return output

    def _on_call(self, name: str) -> None:
        self._entered.append(self._num_calls)
        if self._depth == 0:
            is_layer = id(self._modules[name]) in self._layers
            self._whole.calls.append(("layer", self._num_calls) if is_layer else ("begin", name))

    def _on_inner_return(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Note what hooks on a module inside of a layer see: they may hand it to code after the layers."""
        if len(module._forward_hooks) > 1:  # noqa: SLF001 - torch tells it nowhere else
            self._note(name, output)
        self._num_returns[name] += 1

    def _on_return(self, name: str, output: Any) -> None:
        before, now = self._entered.pop(), self._num_calls
        if self._depth == 0:
            self._whole.calls.append(("end", name))
            self._note(name, output)
            self._num_returns[name] += 1
        if name in self._uses:
            # What has layers inside may use its own parameters before, between and after them.
            self._uses[name] += range(before, now + 1)

    def _note(self, name: str, output: Any) -> None:
        for path, leaf in leaves_by_path(output)[0]:
            if isinstance(leaf, torch.Tensor):
                self._whole.outputs[ModuleOutput(name, self._num_returns[name], path)] = leaf


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str], list[tuple[int, int]], Any]]:
    """Yield attributes and buffers with tensors: module and name, what changes with each write, and the value."""
    for module_name, module in modules.items():
        own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        for name, value in (*own.items(), *module._buffers.items()):  # noqa: SLF001 - without those of modules inside
            if isinstance(value, (torch.Tensor, list, tuple, dict)):
                leaves = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
                if leaves:
                    yield (module_name, name), [(id(each), each._version) for each in leaves], value  # noqa: SLF001


def _forms_of(value: Any) -> tuple[list[Any], Any]:
    leaves, form = pytree.tree_flatten(value)
    return [ActivationMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form


class _Fakes(ConstantRandomMode):
    """A context in which tensors are fake, and single random numbers so high that no layer is skipped by chance.

    Args:
        narrow: Whether floating tensors become bf16.
    """

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self._torch, self._narrow = FakeTensorMode(allow_non_fake_inputs=True), narrow

    def __enter__(self) -> Self:
        """Begin, inside of torch's own mode."""
        self._torch.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End both."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._torch.__exit__(*error)  # type: ignore[arg-type]

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like another one; contiguous where that only stands in for one without values."""
        dtype = torch.bfloat16 if self._narrow and tensor.is_floating_point() else tensor.dtype
        if is_repeated(tensor):
            return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return self._torch.from_tensor(tensor).detach().to(dtype)


def run_dry(model: nn.Module, batch: Any, run: Callable[[Callable[[torch.Tensor], torch.Tensor], Any], None]) -> None:
    """Run something on fake tensors; on real ones where it asks for values.

    Args:
        model: The model; entries of the batch that its forward does not take are left out.
        batch: As its data loader yields it.
        run: Called with what makes a tensor's stand-in, and the batch made of such ones; up to three times, until it
            raises nothing.

    Raises:
        ConfigError: What the function refuses, at once.
        Exception: What it raised on real tensors.
    """
    batch = taken_by(model, batch)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), preserve_attributes(model):
        # Some kernels' shapes are known for bf16 alone, such as those of products of groups.
        for narrow in (False, True):
            try:
                with _Fakes(narrow=narrow) as fakes, quiet_fakes():
                    run(fakes.like, pytree.tree_map_only(torch.Tensor, fakes.like, batch))
            except ConfigError:
                raise
            except Exception:  # noqa: BLE001, S112 - a value was asked for, which only a real run has
                continue
            return
        with ConstantRandomMode(), _Unwritten(model):
            run(torch.Tensor.detach, batch)


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out writes to a model's parameters, which a dry run on real tensors shares."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        strided = (each for each in model.parameters() if each.layout is torch.strided and not is_repeated(each))
        self._storages = {each.untyped_storage()._cdata for each in strided}  # noqa: SLF001 - as torch tells storages apart

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, unless it writes to a parameter in place."""
        del types
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            target = args[0]
            is_strided = target.layout is torch.strided and not isinstance(target, AbsentTensor)
            if is_strided and target.untyped_storage()._cdata in self._storages:  # noqa: SLF001 - likewise
                return target
        return func(*args, **(kwargs or {}))


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters, and such buffers as have no values."""
    shared: list[Any] = [*model.parameters(), *(each for each in model.buffers() if is_repeated(each))]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        shared.append(numpy.random.rand.__self__)  # the generator of all, of which functions in attributes are methods
    return copy.deepcopy(model, {id(each): each for each in shared})


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


def with_stand_ins(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """Return what calls a model with other tensors in the places of its own, given by name."""
    instead = {id(tensor): tensors[name] for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_tensors(model, instead, args, kwargs)

    return call


def call_on(model: nn.Module, tensors: Mapping[str, torch.Tensor], batch: Any) -> Any:
    """Return what a model returns for a batch, with other tensors in the places of its own.

    Args:
        model: The model.
        tensors: As `stand_ins` returns them.
        batch: See `call_with`.
    """
    return call_with(with_stand_ins(model, tensors), batch)


_SMALL = 0.05
"""A list with a smaller part of the layers' parameters is left out where the others fill all stages."""
_SHOWN = 4


@dataclass
class _Call:
    """A call of a member of a list: what it was given and has returned in the autograd graph, and when."""

    name: str
    given: set[tuple[Any, int]]
    entered: int
    returned: set[tuple[Any, int]]
    left: int
    is_layer: bool


def find_layers(model: nn.Module, batch: Any, num_stages: int) -> list[str]:
    """Return the names of the lists whose members are layers of a model, by a dry run.

    Args:
        model: The whole model.
        batch: As its data loader yields it.
        num_stages: How many stages the layers have to fill; 0 finds the outermost lists of which all members are
            called in their order, as sequence parallelism needs them.

    Raises:
        ConfigError: If there are fewer layers than stages, or none; with the reason.
    """
    watch = _Watch(model, in_order=not num_stages)
    run_dry(model, batch, watch.run)
    reasons: dict[str, str] = {}
    chosen = watch.outermost("", reasons)
    sizes = {name: watch.numel(name) for name in chosen}
    large = [name for name in chosen if sizes[name] >= _SMALL * sum(sizes.values())]
    while large and watch.num_layers(large) < num_stages:
        finer = [each for name in large for each in watch.inside(name) or [name]]
        if watch.num_layers(finer) <= watch.num_layers(large):
            break
        large = finer
    for found in (large, chosen):
        if found and watch.num_layers(found) >= num_stages:
            return found
    raise _too_few(model, watch, chosen, num_stages, reasons)


def _too_few(
    model: nn.Module, watch: _Watch, chosen: Sequence[str], num_stages: int, reasons: Mapping[str, str]
) -> ConfigError:
    what = type(model).__name__
    if chosen:
        listed = ", ".join(f"{watch.num_layers([name])} in '{name}'" for name in chosen)
        found = f"{watch.num_layers(chosen)} layers can't fill {num_stages} stages ({what} has {listed})"
        remedy = "Use fewer stages, or fewer chunks on each rank"
    else:
        shown = [f"'{name}' ({reason})" for name, reason in reasons.items()][:_SHOWN]
        lists = f" None of its lists is: {', '.join(shown)}." if shown else " It has no list of modules."
        found = f"{what} has no list of layers that run one after the other, each once in a forward.{lists[:-1]}"
        remedy = "Put its layers into a ModuleList, ModuleDict or Sequential, or use `pp_size=1`"
    return ConfigError(f"{found}. {remedy}; `ShardingPolicy(layers=...)` names lists that were not found.")


class _Watch:
    """Notes the calls of the members of all lists of a model."""

    def __init__(self, model: nn.Module, *, in_order: bool) -> None:
        self._model, self._in_order = model, in_order
        self._modules = dict(model.named_modules())
        name_of = {id(module): name for name, module in self._modules.items()}
        adapters = _lists_of_adapters(self._modules.values())
        self._lists = {
            name: {name_of[id(child)]: child for child in module.children()}
            for name, module in self._modules.items()
            if isinstance(module, CONTAINERS) and id(module) not in adapters
        }
        self._calls: dict[str, list[_Call]] = {}
        self._open: list[_Call] = []
        self._time = 0

    def run(self, make: Callable[[Tensor], Tensor], batch: Any) -> None:
        """Run the model on stand-ins; see `run_dry`."""
        self._calls, self._open, self._time = {}, [], 0
        tensors = stand_ins(self._model, make)
        members = {name: module for each in self._lists.values() for name, module in each.items()}
        handles = []
        for name, module in members.items():
            enter = functools.partial(self._enter, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, prepend=True))
        try:
            call_on(self._model, tensors, batch)
        finally:
            for handle in handles:
                handle.remove()

    def outermost(self, name: str, reasons: dict[str, str]) -> list[str]:
        """Return the lists of layers in a module, or itself; note why others are none."""
        if name in self._lists:
            reason = self._reason(name)
            if reason is None:
                return [name]
            reasons[name] = reason
        return [each for child in self._children(name) for each in self.outermost(child, reasons)]

    def inside(self, name: str) -> list[str]:
        """Return the lists of layers in the members of a list."""
        return [each for member in self._lists[name] for each in self.outermost(member, {})]

    def num_layers(self, lists: Iterable[str]) -> int:
        """Return how many layers are called of some lists."""
        return sum(name in self._calls for each in lists for name in self._lists[each])

    def numel(self, name: str) -> int:
        """Return the number of elements of a list's parameters."""
        return sum(each.numel() for each in self._modules[name].parameters())

    def _children(self, name: str) -> list[str]:
        prefix = f"{name}." if name else ""
        return [prefix + key for key, _ in self._modules[name].named_children() if prefix + key in self._modules]

    def _reason(self, name: str) -> str | None:
        """Return why the members of a list are no layers; ``None`` if they are."""
        calls = sorted(
            (call for member in self._lists[name] for call in self._calls.get(member, ())),
            key=lambda call: call.entered,
        )
        if not calls or not self.numel(name):
            return "no member has parameters" if calls else "no member is called"
        names = [call.name for call in calls]
        if self._in_order and names != [*self._lists[name]]:
            return "not each of its members is called, in their order"
        pairs = zip([None, *calls], calls, strict=False)
        return next((found for pair in pairs if (found := _objection(*pair, names.count(pair[1].name)))), None)

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = _edges((args, kwargs))
        call = _Call(name, given, self._time, set(), self._time, is_layer=False)
        self._time += 1
        self._open.append(call)
        self._calls.setdefault(name, []).append(call)

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        call = self._open.pop()
        call.returned = _edges(output)
        call.left = self._time
        self._time += 1
        call.is_layer = LikeArguments.like(output, {}) is not None


def _lists_of_adapters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ``id`` of the modules in which peft keeps the adapters and copies of a layer, by their names."""
    kinds: tuple[type, ...] = sum(peft_classes(), ())
    return {id(child) for module in modules if isinstance(module, kinds) for child in module.children()}


def _objection(before: _Call | None, call: _Call, count: int) -> str | None:
    """Return why a call of a list's member, after that of another one, is none of a layer."""
    if count > 1:
        return f"'{call.name}' is called {count} times"
    if not call.is_layer:
        return f"'{call.name}' returns no tensor, or plain tuple with one"
    if before is not None and call.entered < before.left:
        return f"'{call.name}' is called inside of '{before.name}'"
    if before is not None and not _reaches(call.given, before.returned):
        return f"what '{call.name}' is given does not depend on what '{before.name}' returns"
    return None


def _edges(value: Any) -> set[tuple[Any, int]]:
    """Return where the differentiable tensors of a nest of containers are in the autograd graph: node and result."""
    leaves = (leaf for _, leaf in leaves_by_path(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    edges = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves]
    return {(edge.node, edge.output_nr) for edge in edges}


def _reaches(start: set[tuple[Any, int]], goal: set[tuple[Any, int]]) -> bool:
    """Return whether a value of a graph depends on another one."""
    if start & goal:
        return True
    nodes = {node for node, _ in goal}
    stack, seen = [node for node, _ in start], set()
    while stack:
        node = stack.pop()
        if node in nodes:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            stack += [each for each, _ in node.next_functions]
    return False
