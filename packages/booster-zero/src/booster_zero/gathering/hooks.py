"""Fetch before use, release after: hooks on the user's modules.

A parameter may be used in three ways, and each is noticed in its own:

- its module's forward runs: hooks before and after that;
- a torch function gets it as an argument anywhere else, as tied heads and functional calls do: a
  ``TorchFunctionMode`` that is active while the model runs;
- backward needs what forward has saved of it: `SavedUses`, which saves a note of where the values are instead of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from booster_core.errors import ConfigError
from booster_zero.engine.described import only_describes
from booster_zero.gathering.leaves import LeafUse
from booster_zero.gathering.saved_uses import SavedUses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from booster_zero.engine.bucket import Bucket
    from booster_zero.gathering.manager import ChunkManager


LeafModules = Mapping[nn.Module, Sequence[nn.Parameter]]
"""Parameters that are gathered as one, by the module in whose forward and backward that happens."""


def check_modules(model: nn.Module) -> None:
    """Check that parameters can be gathered around the forward of each module.

    Raises:
        ConfigError: If a module is scripted, which takes no hooks.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            which = f"Module '{name}'" if name else "The model"
            msg = (
                f"{which} is scripted, so its parameters can't be gathered when it runs. Boost the module without "
                "`torch.jit.script`, or use plugin='zero'."
            )
            raise ConfigError(msg)


@dataclass
class _Frame:
    """One running forward."""

    module: nn.Module
    pinned: list[Bucket] = field(default_factory=list)
    leaf: LeafUse | None = None
    holder: object = field(default_factory=object)
    saves: bool = False
    is_covered: bool = False
    is_outermost: bool = False
    is_differentiated: bool = field(default_factory=torch.is_grad_enabled)


class ParameterHooks:
    """Fetches parameters for a model's modules.

    Args:
        model: The user's model.
        manager: Its chunks.
        before_forward: Called before each outermost forward.
        after_forward: Called after it.
        leaves: What is gathered as one.
        with_model: Parameters that stay gathered during the forward of the whole model.
        on_passed: Called with the numbers of a leaf's parameters when backward has passed it.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: ChunkManager,
        before_forward: Callable[[], None],
        after_forward: Callable[[], None],
        leaves: LeafModules,
        *,
        with_model: Sequence[nn.Parameter] = (),
        on_passed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._manager = manager
        self._before_forward, self._after_forward = before_forward, after_forward
        self._frames: list[_Frame] = []
        self._saved_uses = SavedUses(manager)
        self._mode = _FunctionUses(self)
        for name, module in model.named_modules():
            used = with_model if module is model and with_model else module.parameters(recurse=False)
            own = [manager.index_of[id(parameter)] for parameter in used]
            inside = [manager.index_of[id(parameter)] for parameter in leaves.get(module, ())]
            leaf = LeafUse(manager, inside, on_passed) if inside else None
            if own or any(True for _ in module.parameters()):
                self._hook(module, own, name or type(model).__name__, leaf)

    def _hook(self, module: nn.Module, own: list[int], name: str, leaf: LeafUse | None) -> None:
        hooks = weakref.ref(self)  # a module must not keep alive what belongs to another run
        hooked = weakref.ref(module)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, _: Any) -> None:
            owner = hooks()
            if module is not hooked():  # copies share functions
                raise copy_error()
            if owner is not None:
                owner.enter(module, own, name, leaf)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            owner = hooks()
            if owner is not None:
                owner.leave(module, (args, kwargs), output)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    # ---- modules

    def enter(self, module: nn.Module, own: Sequence[int], name: str, leaf: LeafUse | None = None) -> None:
        """Fetch a module's own parameters before its forward, and those of a leaf."""
        frame = _Frame(module, leaf=leaf)
        if not self._frames and not _is_in_backward():
            self._before_forward()
            self._manager.begin(("forward", module.training, torch.is_grad_enabled(), id(module)))
            frame.is_outermost = True
        self._frames.append(frame)
        if len(self._frames) == 1:
            _keep_from_compiler()
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        if own:
            self._manager.home.moment(name)
            self._manager.note_first_use(own)
            self._pin(frame, own)
            frame.saves = self._saved_uses.push()
        frame.is_covered = frame.saves or self._saved_uses.is_on()
        if leaf is not None:
            self._manager.note_first_use(leaf.indices)
            self._manager.hold(frame.holder, leaf.chunks())

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let go of a module's parameters after its forward, also where that raised and there is no output."""
        if not self._frames or self._frames[-1].module is not module:
            return  # it never got as far as `enter`
        frame = self._frames.pop()
        if frame.saves:
            self._saved_uses.pop()
        for chunk in frame.pinned:
            chunk.pins = max(chunk.pins - 1, 0)
        if frame.leaf is not None:
            self._manager.let_go(frame.holder)
            frame.leaf.expect_backward(inputs, output)
        if not self._frames:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if frame.is_outermost:
                self._manager.end(goes_back=torch.is_grad_enabled())
                self._after_forward()

    def _pin(self, frame: _Frame, indices: Iterable[int]) -> None:
        for chunk in dict.fromkeys(self._manager.chunk_of(index) for index in indices):
            if chunk not in frame.pinned:
                self._manager.use(chunk)
                chunk.pins += 1
                frame.pinned.append(chunk)

    # ---- functions

    def parameters_among(self, values: Iterable[Any]) -> list[int]:
        """Return the numbers of the model's parameters among a call's arguments."""
        index_of = self._manager.index_of
        found = []
        for value in values:
            index = index_of.get(id(value))  # the parameters live as long as their numbers, so an id tells
            if index is not None:
                found.append(index)
            elif isinstance(value, (list, tuple)):
                found += self.parameters_among(value)
        return found

    def call(self, func: Callable[..., Any], indices: Sequence[int], args: Any, kwargs: Any) -> Any:
        """Call a torch function that reads parameters.

        Raises:
            ConfigError: If it has changed one, because only the gathered copy has that change.
        """
        frame = self._frames[-1]
        if not all(self._manager.chunk_of(index) in frame.pinned for index in indices):
            self._manager.note_first_use(indices)
            # They stay until the running forward ends: it may go on with views of them.
            self._pin(frame, indices)
        if frame.is_differentiated and not frame.is_covered and not torch.is_grad_enabled():
            # The forward of a custom autograd function has gradients off, and saves its inputs after it has returned.
            frame.saves = frame.is_covered = self._saved_uses.push(before_saving=True)
        # Also where they were gathered already: autograd would keep the parameter itself, a placeholder in backward.
        saves = not frame.is_covered and self._saved_uses.push()
        # A traced call is a part of a graph, where version counters are no values.
        used = [] if torch.compiler.is_compiling() else [self._manager.parameters[index] for index in indices]
        versions = [parameter._version for parameter in used]  # noqa: SLF001 - as autograd notices changes
        try:
            result = func(*args, **kwargs)
        finally:
            if saves:
                self._saved_uses.pop()
        if versions != [parameter._version for parameter in used]:  # noqa: SLF001
            msg = (
                f"Forward changed a parameter in place, of shape {tuple(used[0].shape)}, by "
                f"`{getattr(func, '__name__', func)}`. That change is dropped with the gathered copy. Change "
                "parameters after `optimizer.step()`, inside of `with model.whole_parameters(writes=True):`."
            )
            raise ConfigError(msg)
        return result


class _FunctionUses(TorchFunctionMode):
    """Notices torch functions that get parameters, while a forward runs."""

    def __init__(self, hooks: ParameterHooks) -> None:
        super().__init__()
        self._hooks = weakref.ref(hooks)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fetch what a function reads, and call it."""
        if torch.compiler.is_compiling():
            return self._call(func, args, kwargs or {})  # traced as a part of a compiled forward
        return self._call_as_it_is(func, args, kwargs or {})

    @_disable_dynamo
    def _call_as_it_is(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        hooks = self._hooks()
        if hooks is None:
            return func(*args, **kwargs)
        indices = hooks.parameters_among(args)
        if kwargs:
            indices += hooks.parameters_among(kwargs.values())
        if not indices or only_describes(func):  # most calls get no parameter: that is seen soonest
            return func(*args, **kwargs)
        return hooks.call(func, indices, args, kwargs)


def copy_error() -> ConfigError:
    """Return the error for a copy of a model whose parameters are in chunks, which has none of them."""
    msg = (
        "A model whose parameters are split over the ranks can't be copied: the copy has no values. For a running mean "
        "of the parameters use `booster.ema(model)`; for a copy of all of them, `model.state_dict()`, which every rank "
        "calls; or copy the model before `boost`, and boost the copy as well."
    )
    return ConfigError(msg)


def _keep_from_compiler() -> None:
    """Keep torch.compile, once it is there, from making graphs of single calls of torch functions.

    It tells functions apart by their addresses there, which getters, such as that of `Tensor.device`, have in turn:
    they are made again for each use, and one would get what was compiled for another.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        compiler.skip_code(_FunctionUses.__torch_function__.__code__)


def _is_in_backward() -> bool:
    """Whether autograd is running, as it is when checkpointed layers are recomputed."""
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001 - no public name
