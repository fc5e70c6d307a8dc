"""Records what construction does to tensors, on meta tensors that stand for the real ones.

Each operation that makes or changes values becomes an `Entry`; views are just other geometries of a storage. Where
construction asks for values, they are found by replaying what they depend on, and where something can't be recorded,
it runs for real and is reported.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from booster_core.errors import LazyInitError
from booster_runtime.lazy.files import OpenFiles
from booster_runtime.lazy.generators import Generators
from booster_runtime.lazy.log import (
    FACTORIES,
    OVERWRITES,
    SHAPE_ONLY,
    Constant,
    Entry,
    Ref,
    Storages,
    is_deferrable,
    is_random,
    written,
)
from booster_runtime.lazy.replay import Replay, find_live
from booster_runtime.lazy.tensor import REMEDY, LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from booster_runtime.lazy.generators import Draw

_META = torch.device("meta")
_READS_VALUES = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"})


class Recorder:
    """The recording of one `LazyInitContext`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.generators = Generators()
        self.run_eagerly: Counter[str] = Counter()
        self.is_open = True
        self.files = OpenFiles()
        # Leave draws out where no values that are wanted depend on any.
        self.draws_if_needed = False
        self._slots = Storages()
        self._lock = threading.RLock()

    # What the context and the tensors call --------------------------------------------------------------------------

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation: record it, answer it, or run it for real."""
        with self._lock:
            leaves = tree_leaves((args, kwargs))
            name = func._schema.name  # noqa: SLF001 - what dispatch modes are meant to read
            if not any(isinstance(leaf, LazyTensor) for leaf in leaves):
                return self._without_lazy(func, name, args, kwargs, leaves)
            if not self.is_open:
                self._check_is_no_forward(func, name, args, kwargs, leaves)
            if name in _READS_VALUES:
                return self._run(func, args, kwargs)
            if any(not isinstance(target, LazyTensor) for target in written(func, args, kwargs)):
                return self._eagerly(func, name, args, kwargs)
            return self._with_lazy(func, name, args, kwargs, leaves)

    def _with_lazy(self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        inner = self._inner_call(args, kwargs)
        try:
            result = func(*inner[0], **inner[1])
        except Exception:  # noqa: BLE001 - shapes that depend on values, no meta kernel, or the user's own mistake
            if next(written(func, args, kwargs), None) is not None and not is_random(func):
                return self._in_place_without_meta(func, name, args, kwargs)
            return self._eagerly(func, name, args, kwargs)
        first = next(leaf for leaf in leaves if isinstance(leaf, LazyTensor))
        device = torch.device(kwargs.get("device") or first.device)
        return result if device == _META else self._record(func, name, args, kwargs, inner, result, device)

    def record_call(
        self, name: str, function: Callable[..., Any], target: LazyTensor, *args: Any, **kwargs: Any
    ) -> None:
        """Record a whole function that overwrites a tensor with random values, as one operation."""
        with self._lock:
            ref = self.ref_of(target)
            self.entries.append(
                Entry(
                    name,
                    function,
                    (ref, *args),
                    kwargs,
                    writes=frozenset({ref.slot}),
                    covers=frozenset({ref.slot}) if self._slots.covers(ref) else frozenset(),
                    draw=self.generators.record(kwargs.get("generator"), target.device),
                )
            )

    def record_source(
        self, name: str, function: Callable[..., torch.Tensor], like: torch.Tensor, *constants: Constant
    ) -> LazyTensor:
        """Record a function of constants that returns a tensor of the geometry of ``like``, a meta tensor."""
        with self._lock:
            tensor = LazyTensor(like, torch.device("cpu"), self)
            self.entries.append(Entry(name, function, constants, {}, results=((0, self.ref_of(tensor)),)))
            return tensor

    def adopt(self, value: torch.Tensor) -> LazyTensor:
        """Return a lazy tensor that will have the values of a real one."""
        constant = Constant(value.detach())
        inner = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        return self.record_source("a real tensor", torch.clone, inner, constant)

    def check_open(self, what: str, instead: str) -> None:
        """Raise where something is legal in the context only.

        Raises:
            LazyInitError: If the context was left.
        """
        if not self.is_open:
            msg = f"{what} is not possible before it has values. {instead}, or later: {REMEDY[0].lower()}{REMEDY[1:]}"
            raise LazyInitError(msg)

    def value_of(self, tensor: LazyTensor) -> torch.Tensor:
        """Return the present values of a lazy tensor."""
        with self._lock:
            ref = self.ref_of(tensor)
            return ref.view_of(self._values({ref.slot})[ref.slot])

    def ref_of(self, tensor: LazyTensor) -> Ref:
        """Return a tensor's place in the recording."""
        return self._slots.ref_of(tensor)

    def finish(self, wanted: Collection[int], hand_over: Callable[[int, torch.UntypedStorage], bool]) -> None:
        """Replay the recording for good: generators that nobody used since end up as after eager construction."""
        places = self.generators.places()
        ends: Sequence[torch.Tensor | None]
        draws = any(self.entries[index].draw is not None for index in find_live(self.entries, wanted))
        if self.draws_if_needed and not draws:
            self.replay(wanted, hand_over)
            ends = [draw.origin() for draw in places]
        elif self.generators.given:
            ends = self.replay((), hand_over, ends_of=places)
            self.replay(wanted, hand_over, uses_given=True)
        else:
            ends = self.replay(wanted, hand_over, ends_of=places)
        for draw, end in zip(places, ends, strict=True):
            if end is not None:
                draw.generator.set_state(end)

    def replay(
        self,
        wanted: Collection[int],
        hand_over: Callable[[int, torch.UntypedStorage], bool],
        *,
        ends_of: Sequence[Draw] = (),
        uses_given: bool = False,
    ) -> list[torch.Tensor]:
        """Replay what some storages need; generators are left as they were before. See `Replay`."""
        replay = Replay(self.entries, wanted, self._slots, hand_over, self.generators, uses_given=uses_given)
        with _disable_current_modes(), self.files.kept_open():
            return replay.run(ends_of)

    # Operations without lazy arguments -------------------------------------------------------------------------------

    def _without_lazy(self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name in FACTORIES or (is_random(func) and not tensors):
            device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
            if device != _META:
                inner = self._inner_call(args, kwargs)
                result = func(*inner[0], **inner[1])
                if is_deferrable(func, result):
                    return self._record(func, name, args, kwargs, inner, result, device)
        elif is_random(func) and any(tensor.device != _META for tensor in tensors):
            return self._eagerly(func, name, args, kwargs)
        return func(*args, **kwargs)

    # Recording -------------------------------------------------------------------------------------------------------

    def _inner_call(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments for the same operation on meta tensors."""
        inner_args, inner_kwargs = tree_map(_to_meta, (args, kwargs))
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        if "device" in inner_kwargs or not has_tensors:
            inner_kwargs["device"] = _META
        inner_kwargs.pop("pin_memory", None)
        if "generator" in inner_kwargs:
            inner_kwargs["generator"] = None
        return inner_args, inner_kwargs

    def _record(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inner: tuple[Any, dict[str, Any]],
        result: Any,
        device: torch.device,
    ) -> Any:
        outer_of = {
            id(meta): leaf
            for meta, leaf in zip(tree_leaves(inner), tree_leaves((args, kwargs)), strict=False)
            if isinstance(leaf, LazyTensor)
        }
        outputs, structure = tree_flatten(result)
        results: list[tuple[int, Ref]] = []
        number = 0
        for index, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            if id(output) in outer_of:
                outputs[index] = outer_of[id(output)]
            else:
                is_new = not self._slots.knows(output)
                outputs[index] = LazyTensor(output, device, self)
                if is_new:
                    results.append((number, self.ref_of(outputs[index])))
            number += 1
        targets = list(written(func, args, kwargs))
        if results or targets:
            self._append(func, name, args, kwargs, targets, tuple(results), device)
        for target in targets:
            if target.shape != target.lazy_inner.shape or target.stride() != target.lazy_inner.stride():
                target.take_geometry(LazyTensor(target.lazy_inner, target.device, self))
        return tree_unflatten(outputs, structure)

    def _append(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: list[LazyTensor],
        results: tuple[tuple[int, Ref], ...],
        device: torch.device,
    ) -> None:
        is_shape_only = name in SHAPE_ONLY
        written_refs = [self.ref_of(target) for target in targets]
        recorded_args, recorded_kwargs = tree_map(
            lambda leaf: self._recorded(leaf, is_shape_only=is_shape_only), (args, kwargs)
        )
        if is_shape_only and any(isinstance(leaf, LazyTensor) for leaf in tree_leaves((args, kwargs))):
            recorded_kwargs = {**recorded_kwargs, "device": device}
        refs = [leaf for leaf in tree_leaves((recorded_args, recorded_kwargs)) if isinstance(leaf, Ref)]
        writes = frozenset(ref.slot for ref in written_refs)
        if name in OVERWRITES:
            read = frozenset(ref.slot for ref in refs[1:])
            covers = frozenset(ref.slot for ref in written_refs if self._slots.covers(ref)) - read
        else:
            read = frozenset(ref.slot for ref in refs if not ref.is_shape_only)
            covers = frozenset()
        self.entries.append(
            Entry(
                name,
                func,
                recorded_args,
                recorded_kwargs,
                reads=read,
                writes=writes,
                covers=covers,
                results=results,
                draw=self.generators.record(kwargs.get("generator"), device) if is_random(func) else None,
            )
        )

    def _in_place_without_meta(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Record an in-place operation whose checks need values, such as assignment through a mask."""
        targets = list(written(func, args, kwargs))
        self._run(func, args, kwargs)  # raises here and now where it is the user's mistake
        self._append(func, name, args, kwargs, targets, (), targets[0].device)
        return targets[0]

    def _recorded(self, leaf: Any, *, is_shape_only: bool) -> Any:
        """Return what stands for an argument in the recording."""
        if isinstance(leaf, LazyTensor):
            return replace(self.ref_of(leaf), is_shape_only=is_shape_only)
        if not isinstance(leaf, torch.Tensor) or leaf.device == _META:
            return leaf
        return Constant(leaf)

    # Values while recording ------------------------------------------------------------------------------------------

    def _values(self, slots: Collection[int]) -> dict[int, torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        self.replay(slots, lambda slot, storage: found.setdefault(slot, storage) is storage)
        return found

    def _eagerly(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run what can't be recorded, for real, with the values that its arguments have by now."""
        self.run_eagerly[name] += 1
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        refs = {id(leaf): self.ref_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)}
        storages = self._values({ref.slot for ref in refs.values()}) if refs else {}
        real = {key: ref.view_of(storages[ref.slot]) for key, ref in refs.items()}
        real_args, real_kwargs = tree_map(lambda leaf: real.get(id(leaf), leaf), (args, kwargs))
        if not is_random(func):
            return func(*real_args, **real_kwargs)
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        draw = self.generators.next(kwargs.get("generator"), device)
        if draw.previous is not None:
            (state,) = self.replay((), lambda *_: False, ends_of=[draw.previous])
            draw.generator.set_state(state)
        with torch.no_grad():
            result = func(*real_args, **real_kwargs)
        self.generators.move_on(draw.generator)
        return result

    def _check_is_no_forward(self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        """Raise where real inputs meet lazy weights outside of the context: that is a forward.

        Raises:
            LazyInitError: In that case.
        """
        has_real_inputs = any(
            isinstance(leaf, torch.Tensor) and not isinstance(leaf, LazyTensor) and leaf.device != _META
            for leaf in leaves
        )
        if has_real_inputs and next(written(func, args, kwargs), None) is None:
            msg = (
                f"A lazy model was run: `{name.removeprefix('aten::')}` got real inputs together with tensors that "
                f"have no values yet. {REMEDY} What belongs to its construction goes into `LazyInitContext`."
            )
            raise LazyInitError(msg)


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return leaf.lazy_inner
    if isinstance(leaf, torch.Tensor) and leaf.device != _META:
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
    return leaf
