"""Parameters that are gathered while they are used, and sharded in between: what Gemini and ZeRO-3 of hybrid share.

A parameter may be used in three ways, and each is noticed in its own:

- a module's forward runs: hooks before and after that. A module whose parameters are all in one bucket has them for all
  modules inside of it, whose hooks return at once;
- anything gets it as an argument elsewhere, as tied heads and functional calls do: its values are absent then, and the
  use itself is seen (`booster_runtime.memory.absent`);
- backward needs what forward has saved of it: `SavedUses`. Saved tensors that are views of a gathered bucket are
  replaced by the number of their parameter and their place in it, so that the bucket's memory can go; backward brings
  the bucket back when it needs them.

Ranks gather buckets together, so that all have to use the same ones in the same order. Experts are chosen by the data,
differently on every rank. A *leaf* gathers the buckets of all its parameters when its forward begins and when its
backward begins, and keeps them until that has ended; what happens inside of it makes no difference to other ranks. (The
idea is that of DeepSpeed's ``set_z3_leaf_modules``.)
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch._compile import _disable_dynamo
from torch.autograd.graph import register_multi_grad_hook
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from booster_core.errors import ConfigError
from booster_runtime.compiling import has_compiled_forward
from booster_runtime.memory import sees_all_uses
from booster_runtime.saved_tensors import SavedTensorHooks
from booster_zero.engine.gatherer import is_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.gatherer import Gatherer
    from booster_zero.engine.layout import Layout

__all__ = ["LeafModules", "ParameterHooks", "check_modules"]


class _Note(NamedTuple):
    """Where saved values are: in which parameter, from which of its bytes, and how they are read."""

    number: int
    start_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conjugate: bool
    is_negative: bool
    version: int


class SavedUses(SavedTensorHooks):
    """Hooks on what autograd saves.

    Args:
        gatherer: Gathers the buckets.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        super().__init__()
        self._gatherer = gatherer

    def take(self, tensor: Tensor) -> _Note | None:
        """Return where a tensor's values are, if they are a parameter's."""
        if tensor.layout is not torch.strided:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside of a function transform, which keeps it alive
            return None
        addresses, bucket_at = self._gatherer.addresses, self._gatherer.bucket_at
        while place := bisect_right(addresses, address):
            begin = addresses[place - 1]
            bucket = bucket_at[begin]
            if bucket.address == begin:
                break
            del addresses[place - 1], bucket_at[begin]  # it has been released since
        else:
            return None
        start = address - begin
        if start >= bucket.whole_bytes:
            return None
        position = bisect_right(bucket.byte_offsets, start) - 1
        return _Note(
            bucket.plan.slots[position].index,
            start - bucket.byte_offsets[position],
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.dtype.is_complex and tensor.is_conj(),
            tensor.is_neg(),
            bucket.parameters[position]._version,  # noqa: SLF001
        )

    def give(self, taken: _Note) -> Tensor:
        """Return a parameter's values, which are gathered for it."""
        gatherer = self._gatherer
        parameter = gatherer.layout.every[taken.number]
        with DisableTorchFunctionSubclass():  # an absent one would ask what the use is
            version = parameter._version  # noqa: SLF001
        if version != taken.version:
            msg = (
                f"Backward needs parameter '{gatherer.layout.names[taken.number]}' as it was in forward, but it has "
                "been changed in place since, by `optimizer.step()` or by hand. Run backward before the step."
            )
            raise RuntimeError(msg)
        bucket = gatherer.layout.bucket_by_index[taken.number]
        whole = gatherer.use_whole(bucket)
        offset_bytes = bucket.byte_offsets[bucket.position_of[taken.number]] + taken.start_bytes
        if taken.dtype == whole.dtype:
            found = whole.as_strided(taken.shape, taken.strides, offset_bytes // taken.dtype.itemsize)
        else:  # parameters begin at multiples of many elements, of whichever format
            found = torch.empty(0, dtype=taken.dtype, device=whole.device)
            found.set_(whole.untyped_storage(), offset_bytes // taken.dtype.itemsize, taken.shape, taken.strides)
        found = torch._conj(found) if taken.is_conjugate else found  # noqa: SLF001 - what sets the flag alone
        return torch._neg_view(found) if taken.is_negative else found  # noqa: SLF001 - the same


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
            if (error := self._gatherer.take_changes()) is not None:
                raise error
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


class LeafUse:
    """Keeps the buckets of one leaf gathered during its backward.

    Args:
        gatherer: Gathers the buckets.
        indices: The parameters of the leaf, by number, in the order in which they are gathered.
        on_passed: Called with ``indices`` when backward has passed all uses of the leaf.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        indices: Sequence[int],
        on_passed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._gatherer = gatherer
        self.indices = tuple(indices)
        self._on_passed = on_passed
        self._expected: weakref.WeakSet[_Use] = weakref.WeakSet()  # a graph that is dropped takes its use along

    def buckets(self) -> list[Bucket]:
        """Return the leaf's buckets as they are laid out now."""
        return self._gatherer.layout.buckets_of(self.indices)

    def expect_backward(self, inputs: Any, outputs: Any) -> None:
        """Gather the buckets once backward has reached an output, until it has left by all inputs.

        Where no input requires a gradient, they stay until the end of backward.

        Args:
            inputs: What forward was called with.
            outputs: What it returned.

        Collective: none; backward is, in the shard group.
        """
        before, after = _differentiated(inputs), _differentiated(outputs)
        if not after:
            return
        holder = _Use()  # what goes out of one may go into the next
        self._expected.add(holder)
        # Not all outputs: one that is used inside, too, has its gradient after others.
        register_multi_grad_hook(after, lambda _: self._gatherer.hold(holder, self.buckets()), mode="any")
        if before:
            register_multi_grad_hook(before, lambda _: self._pass(holder))

    def _pass(self, holder: _Use) -> None:
        self._gatherer.let_go(holder)
        self._expected.discard(holder)
        if not self._expected and self._on_passed is not None:
            self._on_passed(self.indices)


class _Use:
    """One use of a leaf in a forward, which holds its buckets in backward."""


def _differentiated(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require gradients."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                found.append(each)
        elif is_dataclass(each) and not isinstance(each, type):
            found += _differentiated([getattr(each, field.name) for field in fields(each)])
    return found
