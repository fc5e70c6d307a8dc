"""Fetch before use, release after: hooks on the user's modules.

A parameter may be used in three ways, and each is noticed in its own:

- a module's forward runs: hooks before and after that. A module whose parameters are all in one bucket has them for all
  modules inside of it, whose hooks return at once;
- anything gets it as an argument elsewhere, as tied heads and functional calls do: its values are absent then, and the
  use itself is seen (`booster_runtime.memory.absent`);
- backward needs what forward has saved of it: `SavedUses`, which saves a note of where the values are instead of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from booster_core.errors import ConfigError
from booster_runtime.compiling import has_compiled_forward
from booster_runtime.memory import sees_all_uses
from booster_zero.engine.gatherer import is_in_backward
from booster_zero.gathering.leaves import LeafUse
from booster_zero.gathering.saved_uses import SavedUses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.gatherer import Gatherer
    from booster_zero.engine.layout import Layout


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


class _Part:
    """What is known of a hooked module.

    Args:
        module: The module.
        name: Its name.
        own: The numbers of the parameters that its own forward uses.
        inside: Those of all parameters in it.
        leaf: What it gathers as one, if anything.
    """

    def __init__(
        self, module: nn.Module, name: str, own: tuple[int, ...], inside: tuple[int, ...], leaf: LeafUse | None
    ) -> None:
        self.module = weakref.ref(module)
        self.name, self.own, self.inside, self.leaf = name, own, inside, leaf
        self.has_all = self.has_end = False
        self._buckets: list[Bucket] = []
        self._of: list[Bucket] | None = None

    def buckets(self, layout: Layout) -> list[Bucket]:
        """Return what its forward has gathered, as buckets are laid out now.

        Args:
            layout: All buckets, of which another list is another layout. ``has_all`` is set by it.
        """
        if self._of is not layout.buckets:
            self._of, self._buckets = layout.buckets, layout.buckets_of(self.inside)
            # As much as a bucket may take is gathered at once in any case.
            taken = sum(bucket.whole_bytes for bucket in self._buckets)
            self.has_all = len(self._buckets) == 1 or taken <= layout.bucket_bytes or self.own == self.inside
            if not self.has_all:
                self._buckets = layout.buckets_of(self.own)
        return self._buckets


class _Frame:
    """One running forward; it holds what its leaf gathers.

    Args:
        part: The module whose it is.
        pinned: The buckets that stay gathered until it ends.
    """

    __slots__ = ("is_outermost", "part", "pinned", "saves")

    def __init__(self, part: _Part, pinned: list[Bucket], *, is_outermost: bool) -> None:
        self.part = part
        self.pinned = pinned
        self.saves = False
        self.is_outermost = is_outermost


class _Scope:
    """What hooks ask first: whether everything inside of the running module is gathered."""

    __slots__ = ("is_gathered",)

    def __init__(self) -> None:
        self.is_gathered = False


class ParameterHooks:
    """Fetches parameters for a model's modules.

    Args:
        model: The user's model.
        gatherer: Gathers its buckets.
        before_forward: Called before each outermost forward.
        after_forward: Called after it.
        leaves: What is gathered as one.
        with_model: Parameters that stay gathered during the forward of the whole model.
        on_passed: Called with the numbers of a leaf's parameters when backward has passed it.
    """

    def __init__(
        self,
        model: nn.Module,
        gatherer: Gatherer,
        before_forward: Callable[[], None],
        after_forward: Callable[[], None],
        leaves: LeafModules,
        *,
        with_model: Sequence[nn.Parameter] = (),
        on_passed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._gatherer = gatherer
        self._before_forward, self._after_forward = before_forward, after_forward
        self._frames: list[_Frame] = []
        self._scope = _Scope()
        self._saved_uses = SavedUses(gatherer)
        # Autograd may keep a parameter itself. Backward must not find it without values where that isn't seen.
        self._covers_all = not all(sees_all_uses(bucket.format.device) for bucket in gatherer.layout.buckets)
        # The compiler compiles again for modules whose hooks have other numbers.
        self._first_id = RemovableHandle.next_id
        index_of = gatherer.layout.index_of
        compiled: set[nn.Module] = set()  # modules inside of a compiled forward, which would break at their hooks
        gathered: set[nn.Module] = set()  # those inside of one that has all of them gathered
        for name, module in model.named_modules():
            inside = tuple(index_of[id(parameter)] for parameter in module.parameters())
            if module in compiled or not inside:
                continue
            is_whole = has_compiled_forward(module) and any(True for _ in module.children())
            parts = list(module.modules()) if is_whole else [module]
            compiled.update(parts[1:])
            used = with_model if module is model and with_model and not is_whole else module.parameters(is_whole)
            own = tuple(index_of[id(parameter)] for parameter in used)
            chosen = [index_of[id(each)] for part in parts for each in leaves.get(part, ())]
            leaf = LeafUse(gatherer, chosen, on_passed) if chosen else None
            part = _Part(module, name or type(model).__name__, own, inside, leaf)
            part.buckets(gatherer.layout)
            if part.has_all:
                gathered.update(each for each in module.modules() if each is not module)
            self._hook(module, part)
            if module not in gathered or leaf is not None:
                self._hook_end(module, part)

    def _hook(self, module: nn.Module, part: _Part) -> None:
        hooks, scope = weakref.ref(self), self._scope  # a module must not keep alive what belongs to another run
        is_leaf = part.leaf is not None

        def enter(module: nn.Module) -> None:
            owner = hooks()
            if owner is not None and module is part.module():  # copies share functions
                owner.enter(module, part)

        uncompiled = _disable_dynamo(enter)

        # The compiler leaves this call as it is. Asking for that at each call takes longer than most of them.
        def before(module: nn.Module, _: Any) -> None:
            if is_leaf or not scope.is_gathered:
                (uncompiled if is_dynamo_compiling() else enter)(module)

        with _numbered_from(self._first_id):
            module.register_forward_pre_hook(before, prepend=True)

    def _hook_end(self, module: nn.Module, part: _Part) -> None:
        """Put the other hook on a module, which those that are only called inside of gathered ones do without."""
        hooks = weakref.ref(self)
        part.has_end = True

        def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
            owner = hooks()
            return None if owner is None else owner.leave(module, inputs, output)

        uncompiled = _disable_dynamo(leave)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return (uncompiled if is_dynamo_compiling() else leave)(module, (args, kwargs), output)

        with _numbered_from(self._first_id + 1):
            module.register_forward_hook(after, with_kwargs=True, always_call=True)

    # ---- modules

    def enter(self, module: nn.Module, part: _Part) -> None:
        """Fetch a module's own parameters before its forward, and those of a leaf.

        Args:
            module: The module.
            part: What is known of it.
        """
        gatherer, frames = self._gatherer, self._frames
        if self._scope.is_gathered and part.leaf is None:
            return
        if not part.has_end:
            self._hook_end(module, part)
        is_outermost = not frames and not is_in_backward()
        if is_outermost:
            self._before_forward()
            gatherer.begin(("forward", module.training, torch.is_grad_enabled(), id(module)))
        elif not frames:
            gatherer.end_with_backward()
        frame = _Frame(part, [], is_outermost=is_outermost)
        frames.append(frame)
        gatherer.use_in_forward = self._use
        if buckets := part.buckets(gatherer.layout):
            if gatherer.memory.moves:
                gatherer.memory.moment(part.name)
            for bucket in buckets:
                gatherer.use(bucket)
                bucket.pins += 1
                frame.pinned.append(bucket)
        if buckets or (is_outermost and self._covers_all):
            frame.saves = self._saved_uses.push()
        self._scope.is_gathered = part.has_all
        if part.leaf is not None:
            gatherer.hold(frame, part.leaf.buckets())

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Let go of a module's parameters after its forward, also where that raised and there is no output.

        Returns:
            What to return in place of the output; ``None`` for the output itself.
        """
        frames = self._frames
        if not frames or frames[-1].part.module() is not module:
            return None  # it never got as far as `enter`
        frame = frames.pop()
        self._scope.is_gathered = bool(frames) and frames[-1].part.has_all
        if frame.saves:
            self._saved_uses.pop()
        for bucket in frame.pinned:
            bucket.pins = max(bucket.pins - 1, 0)
        if (leaf := frame.part.leaf) is not None:
            self._gatherer.let_go(frame)
            leaf.expect_backward(inputs, output)
        if frames:
            return None
        kept = self._kept(output) if frame.is_outermost else None
        self._gatherer.use_in_forward = None
        if frame.is_outermost:
            self._gatherer.end(goes_back=torch.is_grad_enabled())
            self._after_forward()
            self._gatherer.raise_own_changes()
        return kept

    def _kept(self, output: Any) -> Any:
        """Return an output with views in place of parameters, which keep their values; ``None`` if it has none."""
        gatherer, index_of = self._gatherer, self._gatherer.layout.index_of
        if not any(id(each) in index_of for each in tree_leaves(output)):
            return None

        def view(value: Any) -> Any:
            index = index_of.get(id(value))
            if index is None:
                return value
            gatherer.use(gatherer.layout.bucket_of(index))
            return value.view(value.shape)

        return tree_map(view, output)

    def _use(self, index: int) -> AbstractContextManager[None] | None:
        """Gather for a use outside of the parameter's own module."""
        bucket = self._gatherer.layout.bucket_of(index)
        self._gatherer.use(bucket)
        # Until the running forward ends: it may go on with views.
        bucket.pins += 1
        self._frames[-1].pinned.append(bucket)
        is_free = not torch.is_grad_enabled() or self._saved_uses.is_on()
        return None if is_free else self._saving()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        saves = self._saved_uses.push()
        try:
            yield
        finally:
            if saves:
                self._saved_uses.pop()


@contextlib.contextmanager
def _numbered_from(number: int) -> Iterator[None]:
    """Let a module's next hook have a number, which is one module's alone."""
    last = RemovableHandle.next_id
    RemovableHandle.next_id = number
    try:
        yield
    finally:  # whoever registers the next hook must not replace one of these
        RemovableHandle.next_id = max(last, RemovableHandle.next_id)
