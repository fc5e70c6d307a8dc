"""`StageForwardMode`: one forward of one stage, in which the model's own code meets tensors whose values are elsewhere.

Outside of the layers each stage runs the model's own Python. A function that is given an absent tensor returns an
absent one, and each draws from a stream of its own, so that what one stage leaves out changes nothing on another.
Layers and other modules that are not run return absent tensors in the form of what they would return.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import AbsentValueError
from booster_hybrid.pipeline.absent import (
    AbsentTensor,
    ActivationMeta,
    MetaCache,
    absent_like,
    has_absent,
    in_trial,
    is_plain,
    noting_errors,
    read_error,
    with_arrived,
)
from booster_hybrid.pipeline.label_means import MEANS, mean_of_batch
from booster_hybrid.torch_functions import changes_in_place, name_of
from booster_runtime.data import hides_tensors
from booster_runtime.memory import only_describes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from booster_hybrid.pipeline.absent import ModuleOutput
    from booster_hybrid.random_streams import MicrobatchStreams

_MOST_KNOWN = 256
"""Forms of arguments that are remembered for each module."""
_FORM_OF_FIRST = frozenset(
    {getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
    | {getattr(Tensor, f"new_{name}") for name in ("empty", "empty_strided", "full", "ones", "tensor", "zeros")}
)
"""Functions that look at the form of their first argument alone."""
_FORM_OF_SECOND = frozenset({Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as})
"""Functions that look at the form of their second argument alone, where that is a tensor."""


OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, where its tensors and hooks are."""
_MISSING = object()


_describes = functools.cache(only_describes)


class KnownReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a known tensor's values decided something.

    Attributes:
        were_seen: Whether they did.
        is_paused: Whether what runs now reads absent values, as zeros.
    """

    _TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.were_seen = self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does."""
        del types
        self.were_seen = self.were_seen or not (self.is_paused or self._TAGS.isdisjoint(func.tags))
        return func(*args, **(kwargs or {}))


class StageForwardMode(TorchFunctionMode):
    """A function mode around one forward of one stage.

    Args:
        forms: What functions return.
        streams: Where the microbatch draws from; ``None`` leaves the generators alone.

    Attributes:
        errors: Reads of absent values so far, as the model's own code may have caught them.
        has_arrived: Whether values of absent tensors have come, which these stand for from then on.
    """

    def __init__(self, forms: MetaCache, streams: MicrobatchStreams | None) -> None:
        super().__init__()
        self._forms, self._streams = forms, streams
        self._is_paused = self.has_arrived = False
        self._reads: KnownReads | None = None
        self.errors: list[AbsentValueError] = []

    @property
    def is_trying(self) -> bool:
        """Whether what runs now only shows what it would return."""
        return self._reads is not None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, or let absent tensors through it."""
        del types
        kwargs = kwargs or {}
        if self._is_paused or _describes(func):  # an absent tensor answers for itself; hooks on it wait in vain
            return func(*args, **kwargs)
        if func is Tensor.__iter__:  # the tensors of an iterator would pass by
            return iter(self._run(Tensor.unbind, args, kwargs))
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = self._streams is not None and self._reads is None and self._streams.begin_function(func, kwargs)
        try:
            if not has_absent(args) and not (kwargs and has_absent(kwargs)):
                return mean_of_batch(func, args, kwargs) if func in MEANS else func(*args, **kwargs)
            if self.has_arrived:
                if changes_in_place(func, args, kwargs, AbsentTensor):
                    self._refuse_write(func, args, kwargs)
                args, kwargs = with_arrived((args, kwargs))
                if not has_absent(args) and not has_absent(kwargs):
                    return mean_of_batch(func, args, kwargs) if func in MEANS else func(*args, **kwargs)
            if func is Tensor.__repr__:
                return repr(args[0])
            if not has_absent(args[1:]) and not (kwargs and has_absent(kwargs)) and func in _FORM_OF_FIRST:
                return func(ActivationMeta.of(args[0]).empty(), *args[1:], **kwargs)
            if func in _FORM_OF_SECOND and not has_absent(args[0]) and not (kwargs and has_absent(kwargs)):
                return func(args[0], *_emptied(args[1:]), **kwargs)
            return self._let_through(func, args, kwargs)
        finally:
            if draws and self._streams is not None:
                self._streams.end_function()

    def arrive(self, arguments: Mapping[str, Any], received: Mapping[str, Tensor]) -> None:
        """Let absent arguments of the stage's first layer, by path, be what came in their places from now on.

        The model's own code goes on with the same objects, as where it adds a layer's output to its input.
        """
        for path, tensor in received.items():
            own = arguments.get(path)
            if isinstance(own, AbsentTensor):
                own.arrived, self.has_arrived = tensor, True

    def _refuse_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a function would write to what has come: views of it that were made before are absent still."""
        absent = (each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, AbsentTensor))
        written = next((each for each in absent if each.arrived is not None), None)
        if written is not None:
            msg = (
                f"The model changes values of {written.origin} in place (by `{name_of(func)}`), which this pipeline "
                "stage has received, and the example at `boost` did not show it. Let it make a new tensor (`x = x + y` "
                "for `x += y`), or use `pp_size=1`."
            )
            read = f"`{name_of(func)}` changes in place values of {written.origin}"
            self.errors.append(read_error(msg, read, written.outputs))
            raise self.errors[-1]

    def _let_through(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._reads is None:
            return self._forms.result(func, args, kwargs, self._write)
        before, self._reads.is_paused = self._reads.is_paused, True
        try:
            return self._forms.result(func, args, kwargs, self._write)
        except AbsentValueError:
            return self._forms.on_zeros(func, args, kwargs)
        finally:
            self._reads.is_paused = before

    def _write(self, func: Callable[..., Any], origin: str, outputs: tuple[ModuleOutput, ...]) -> None:
        """Refuse to write absent values into memory that has some: views of it would be as they were."""
        if self.is_trying:
            return
        msg = (
            f"The model writes values of {origin}, which another pipeline stage has, into a tensor that this one has "
            f"(by `{name_of(func)}`, outside of its layers). Let it make a new tensor, do so inside of a layer, or use "
            "`pp_size=1`."
        )
        self.errors.append(read_error(msg, f"`{name_of(func)}` writes values of {origin} into a known tensor", outputs))
        raise self.errors[-1]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note reads of absent values inside."""
        with noting_errors(self.errors):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode: what runs inside has all of its values."""
        before, self._is_paused = self._is_paused, True
        is_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if is_top:
            _pop_mode()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if is_top:
                _push_mode(self)  # type: ignore[no-untyped-call]
            self._is_paused = before

    @contextlib.contextmanager
    def trying(self) -> Iterator[KnownReads]:
        """Let a call run only to see what it would return: absent values that it reads are zeros."""
        before, reads = self._reads, KnownReads()
        self._reads = reads
        try:
            with in_trial(), reads:
                yield reads
        finally:
            self._reads = before


class NotedRun(StageForwardMode):
    """A stage's run that notes which functions are called.

    Args:
        forms: As for `StageForwardMode`.
        calls: Gets the functions' names, each with the shapes that it was given.
    """

    def __init__(self, forms: MetaCache, calls: list[Any]) -> None:
        super().__init__(forms, None)
        self._calls = calls

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_trying:
            tensors = (each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            self._calls.append((name_of(func), *(tuple(each.shape) for each in tensors)))
        return super()._run(func, args, kwargs)


def _emptied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        ActivationMeta.of(each).empty() if isinstance(each, Tensor) and has_absent(each) else each for each in values
    )


class AbsentCalls:
    """Tells what a module that is not run would return, without the values; remembered by the arguments' forms.

    Args:
        module: The module, without collectives in its forward.
        forward: That forward.
        origin: What the module is called in errors.

    Attributes:
        parts: The modules inside.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], origin: str) -> None:
        self._module, self._forward, self._origin = module, forward, origin
        self.parts = [each for each in module.modules() if each is not module]
        self._hooks = [part._forward_hooks for part in self.parts]  # noqa: SLF001 - torch tells it nowhere else
        self._known: dict[Any, tuple[Any, list[tuple[nn.Module, Any]]]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at what modules inside return, by forward hooks."""
        return any(self._hooks)

    def result(
        self,
        run: StageForwardMode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seen: list[tuple[nn.Module, Any]] | None = None,
    ) -> Any:
        """Return what a call would return; hooks on the modules inside are shown what these would return.

        Args:
            run: The forward of the stage.
            args: Of the call.
            kwargs: Of the call.
            seen: Gets the modules whose hooks were shown something, also where the call fails after that.

        Raises:
            Exception: What the forward raises without values.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self._without_values, (args, dict(kwargs)))
        key = self._key(args, kwargs)
        found = None if key is None else self._known.get(key)
        if found is not None:
            for module, output in found[1]:
                show(module, self._filled(output))
            return self._filled(found[0])
        inner: list[tuple[nn.Module, Any]] = [] if seen is None else seen
        with (
            run.trying() as reads,
            preserve_attributes(self._module),
            _kept_buffers(self._module),
            contextlib.ExitStack() as stack,
        ):
            for part in self.parts:
                stack.callback(
                    part.register_forward_hook(lambda part, _, output: self._note(inner, part, output)).remove
                )
            output = self._forward(*args, **kwargs)
        output = pytree.tree_map_only(Tensor, ActivationMeta.of, output)
        if (
            key is not None
            and not reads.were_seen
            and all(map(_is_plain_form, pytree.tree_leaves(output, is_leaf=_is_form)))
        ):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = output, inner
        return self._filled(output)

    def _without_values(self, tensor: Tensor) -> Tensor:
        is_known = tensor.is_floating_point() and not isinstance(tensor, AbsentTensor)
        return absent_like(ActivationMeta.of(tensor), self._origin) if is_known else tensor

    def _note(self, inner: list[tuple[nn.Module, Any]], part: nn.Module, output: Any) -> Any:
        """Note what a module inside would return, and let other hooks see that it is absent."""
        forms = pytree.tree_map_only(Tensor, ActivationMeta.of, output)
        inner.append((part, forms))
        return self._filled(forms)

    def _filled(self, forms: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: absent_like(leaf, self._origin) if isinstance(leaf, ActivationMeta) else leaf,
            forms,
            is_leaf=_is_form,
        )

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not all(map(is_plain, leaves)):
            return None
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        described: Sequence[Any] = [
            ActivationMeta.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf)) for leaf in leaves
        ]
        return structure, casts, self._module.training, torch.is_grad_enabled(), *described


def _is_form(value: Any) -> bool:
    return isinstance(value, ActivationMeta)


def _is_plain_form(leaf: Any) -> bool:
    return isinstance(leaf, ActivationMeta) or is_plain(leaf)


def show(module: nn.Module, output: Any, *, without: int | None = None) -> None:
    """Call a module's forward hooks as if it had returned something.

    Args:
        module: The module.
        output: What it would return.
        without: The hook to leave out.
    """
    for key, hook in list(module._forward_hooks.items()):  # noqa: SLF001 - nothing else calls them
        if key != without:
            is_named = key in module._forward_hooks_with_kwargs  # noqa: SLF001 - likewise
            replaced = hook(module, (), *([{}] if is_named else []), output)
            output = output if replaced is None else replaced


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Put tensors back that a forward leaves in modules, as they are fake; other attributes stay as they are set.

    So are those that it adds to lists and dicts. Models note in attributes which hooks they have registered, for
    example, and hooks stay.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, kept in before
        for name, value in kept.items()
        if type(value) in (list, dict) and name not in OF_TORCH
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


@contextlib.contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Let a module write to copies of its buffers."""
    before = [(each, dict(each._buffers)) for each in module.modules()]  # noqa: SLF001 - setting them would check each
    try:
        for each, buffers in before:
            for name, buffer in buffers.items():
                each._buffers[name] = None if buffer is None else buffer.clone()  # noqa: SLF001 - likewise
        yield
    finally:
        for each, buffers in before:
            each._buffers.update(buffers)  # noqa: SLF001 - likewise
