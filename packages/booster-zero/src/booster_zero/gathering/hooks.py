"""Fetch before use, release after: hooks on the user's modules.

A parameter may be used in three ways, and each is noticed in its own:

- its module's forward runs: hooks before and after that;
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


class _Frame:
    """One running forward; it holds what its leaf gathers.

    Args:
        module: Whose it is.
        leaf: What the module gathers as one, if anything.
        pinned: The buckets that stay gathered until it ends.
    """

    __slots__ = ("is_outermost", "leaf", "module", "pinned", "saves")

    def __init__(self, module: nn.Module, leaf: LeafUse | None, pinned: list[Bucket]) -> None:
        self.module = module
        self.leaf = leaf
        self.pinned = pinned
        self.saves = False
        self.is_outermost = False


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
        self._saved_uses = SavedUses(gatherer)
        # Autograd may keep a parameter itself. Backward must not find it without values where that isn't seen.
        self._covers_all = not all(sees_all_uses(bucket.format.device) for bucket in gatherer.layout.buckets)
        first_id = next_id = RemovableHandle.next_id
        compiled: set[nn.Module] = set()  # modules inside of a compiled forward, which would break at their hooks
        for name, module in model.named_modules():
            if module in compiled:
                continue
            parts = [module]
            if has_compiled_forward(module):
                parts += [part for part in module.modules() if part is not module]
                compiled.update(parts)
            RemovableHandle.next_id = first_id  # the compiler compiles again for modules whose hooks have other numbers
            is_whole = len(parts) > 1
            used = with_model if module is model and with_model and not is_whole else module.parameters(is_whole)
            own = tuple(gatherer.layout.index_of[id(parameter)] for parameter in used)
            inside = [gatherer.layout.index_of[id(each)] for part in parts for each in leaves.get(part, ())]
            leaf = LeafUse(gatherer, inside, on_passed) if inside else None
            if own or any(True for _ in module.parameters()):
                self._hook(module, own, name or type(model).__name__, leaf)
            next_id = max(next_id, RemovableHandle.next_id)
        RemovableHandle.next_id = next_id  # whoever registers the next hook must not replace one of these

    def _hook(self, module: nn.Module, own: tuple[int, ...], name: str, leaf: LeafUse | None) -> None:
        hooks = weakref.ref(self)  # a module must not keep alive what belongs to another run
        hooked = weakref.ref(module)

        def enter(module: nn.Module) -> None:
            owner = hooks()
            if owner is not None and module is hooked():  # copies share functions
                owner.enter(module, own, name, leaf)

        def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
            owner = hooks()
            return None if owner is None else owner.leave(module, inputs, output)

        uncompiled_enter, uncompiled_leave = _disable_dynamo(enter), _disable_dynamo(leave)

        # The compiler leaves these calls as they are. Asking for that at each call takes longer than most of them.
        def before(module: nn.Module, _: Any) -> None:
            (uncompiled_enter if is_dynamo_compiling() else enter)(module)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return (uncompiled_leave if is_dynamo_compiling() else leave)(module, (args, kwargs), output)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    # ---- modules

    def enter(self, module: nn.Module, own: tuple[int, ...], name: str, leaf: LeafUse | None) -> None:
        """Fetch a module's own parameters before its forward, and those of a leaf.

        Args:
            module: The module.
            own: The numbers of its parameters.
            name: Its name.
            leaf: What it gathers as one, if anything.
        """
        gatherer, frames = self._gatherer, self._frames
        frame = _Frame(module, leaf, [])
        if not frames and is_in_backward():
            gatherer.end_with_backward()
        elif not frames:
            self._before_forward()
            gatherer.begin(("forward", module.training, torch.is_grad_enabled(), id(module)))
            frame.is_outermost = True
        frames.append(frame)
        gatherer.use_in_forward = self._use
        if own:
            gatherer.memory.moment(name)
            for bucket in gatherer.layout.buckets_of(own):
                self._pin(frame, bucket)
        if own or (frame.is_outermost and self._covers_all):
            frame.saves = self._saved_uses.push()
        if leaf is not None:
            gatherer.hold(frame, leaf.buckets())

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Let go of a module's parameters after its forward, also where that raised and there is no output.

        Returns:
            What to return in place of the output; ``None`` for the output itself.
        """
        if not self._frames or self._frames[-1].module is not module:
            return None  # it never got as far as `enter`
        frame = self._frames.pop()
        if frame.saves:
            self._saved_uses.pop()
        for bucket in frame.pinned:
            bucket.pins = max(bucket.pins - 1, 0)
        if frame.leaf is not None:
            self._gatherer.let_go(frame)
            frame.leaf.expect_backward(inputs, output)
        if self._frames:
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

    def _pin(self, frame: _Frame, bucket: Bucket) -> None:
        self._gatherer.use(bucket)
        bucket.pins += 1
        frame.pinned.append(bucket)

    def _use(self, index: int) -> AbstractContextManager[None] | None:
        """Gather for a use outside of the parameter's own module."""
        frame = self._frames[-1]
        # Until the running forward ends: it may go on with views.
        self._pin(frame, self._gatherer.layout.bucket_of(index))
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
