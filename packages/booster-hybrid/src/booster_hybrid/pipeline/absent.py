"""Tensors whose values a stage can't know: what layers and parameters of other stages make.

An absent tensor has shape, strides, dtype and device, and no storage. Where a stage runs the model's code outside of
its layers, operations on it return absent tensors in the form of what they would return. Anywhere else, and wherever
its values decide something, it raises `AbsentValueError`. Values that an engine brings when they are used are another
kind of absent ones; see `booster_runtime.memory`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from booster_core.errors import AbsentValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


_MOST_KNOWN = 4096
"""Calls whose results' forms are remembered."""
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    slice,
    type(Ellipsis),
)
_TRIALS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.zeros_like,
    torch.ones_like,
    lambda like: torch.arange(like.numel(), device=like.device).reshape(like.shape).to(like.dtype),
)
"""Values that absent ones are tried with, where the shape of a result may depend on known values alone."""
_FORM_OF_FIRST = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *(f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
        *(f"new_{kind}" for kind in ("empty", "empty_strided", "full", "ones", "zeros")),
    )
)
"""Operations that look at the form of their first argument alone."""


class ModuleOutput(NamedTuple):
    """A tensor that a module returns.

    Args:
        module: Name of the module: one outside of the layers, a layer as seen from outside, or one inside of a layer,
            where hooks see what it returns.
        call: Which of its calls in one forward.
        path: Where in what it returns.
    """

    module: str
    call: int
    path: str

    @property
    def is_in_tuple(self) -> bool:
        """Whether it is all that the module returns, or directly in a tuple that it returns."""
        return not self.path or self.path[1:-1].isdigit()

    @property
    def place(self) -> int | None:
        """Its index in the tuple that the module returns; ``None`` where it is all of it."""
        return int(self.path.strip("[]")) if self.path else None

    @property
    def name(self) -> str:
        """What it is called on its way to another stage."""
        return f"{self.module}#{self.call}{self.path}"


class ActivationMeta(NamedTuple):
    """All of a tensor but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> ActivationMeta:
        """Return a tensor's form."""
        if isinstance(tensor, AbsentTensor):
            return tensor.form
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the public context is for subclasses alone
            stride = tensor.stride() if tensor.layout is torch.strided else ()
            return cls(tensor.shape, stride, tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor of this form, with memory that nobody has written to, on its device or another."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


class AbsentTensor(Tensor):
    """A tensor without values; see `absent_like`. It asks for no gradient: nothing comes back to it."""

    form: ActivationMeta
    origin: str
    outputs: tuple[ModuleOutput, ...] = ()  # in a dry run: from what its values could be computed
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - as torch's own wrappers

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it takes by position alone
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let an operation through, or refuse to compute with it."""
        del types
        if func is torch.ops.aten.detach.default:
            return absent_like(ActivationMeta.of(args[0]), args[0].origin, args[0].outputs)
        forms = _forms.get()
        if forms is None or torch.Tag.data_dependent_output in func.tags:
            refuse(name_of_operation(func), (args, kwargs))
        return forms.result(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not annotated
        """Return a description, which has no values."""
        del tensor_contents
        return f"<absent {tuple(self.shape)} {self.dtype}: {self.origin}>"

    def __format__(self, spec: str) -> str:
        """Return the description; refuse to show values in a format for numbers."""
        return repr(self) if not spec else refuse("__format__", self)

    def __deepcopy__(self, memo: object) -> AbsentTensor:
        """Return another one of the same form."""
        return absent_like(ActivationMeta.of(self), self.origin, self.outputs)

    def data_ptr(self) -> int:
        """Refuse, but where a call only shows what it would return: kernels are chosen by the alignment."""
        if not _is_trial.get():
            refuse("data_ptr", self)
        return 0


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a method that refuses to read values."""
    return lambda self, *_, **__: refuse(name, self)


# What torch answers without asking `__torch_dispatch__`.
for _method in ("numpy", "tolist", "untyped_storage", "__array__", "__dlpack__", "__reduce_ex__"):
    setattr(AbsentTensor, _method, _refused(_method.strip("_")))


_forms: ContextVar[ResultForms | None] = ContextVar("booster absent forms", default=None)
"""What lets absent tensors through; ``None`` where they can't be computed with."""
_is_trial: ContextVar[bool] = ContextVar("booster absent trial", default=False)
_errors: ContextVar[list[AbsentValueError] | None] = ContextVar("booster absent errors", default=None)
"""Where the errors of a run are noted, as the model's own code may catch them."""


class letting_through:  # noqa: N801 - a function for who uses it; around each layer, where a generator costs more
    """Let operations on absent tensors return such tensors inside; with ``None`` they raise.

    Args:
        forms: What they return.
    """

    __slots__ = ("_forms", "_token")
    _token: Token[ResultForms | None]

    def __init__(self, forms: ResultForms | None) -> None:
        self._forms = forms

    def __enter__(self) -> None:
        """Begin."""
        self._token = _forms.set(self._forms)

    def __exit__(self, *_: object) -> None:
        """End."""
        _forms.reset(self._token)


@contextlib.contextmanager
def noting_errors(errors: list[AbsentValueError]) -> Iterator[None]:
    """Add the errors of reads inside to a list."""
    token = _errors.set(errors)
    try:
        yield
    finally:
        _errors.reset(token)


@contextlib.contextmanager
def in_trial(forms: ResultForms) -> Iterator[None]:
    """Let a call inside show what it would return: it may write to what it has, and addresses are aligned."""
    token = _is_trial.set(True)
    try:
        with noting_errors([]), letting_through(forms):
            yield
    finally:
        _is_trial.reset(token)


def is_in_trial() -> bool:
    """Return whether what runs now only shows what it would return."""
    return _is_trial.get()


def is_plain(leaf: Any) -> bool:
    """Return whether something in a call's arguments or results is a tensor, or can't change."""
    return isinstance(leaf, (Tensor, *_PLAIN))


def absent_like(form: ActivationMeta, origin: str, outputs: tuple[ModuleOutput, ...] = ()) -> AbsentTensor:
    """Return a tensor without values.

    Args:
        form: Its shape, strides, dtype and device.
        origin: What has the values, for errors: ``"layer 'layers.0'"``.
        outputs: In a dry run: from what the values could be computed.
    """
    made: AbsentTensor = Tensor._make_wrapper_subclass(  # noqa: SLF001 - documented for this
        AbsentTensor, form.shape, strides=form.stride, dtype=form.dtype, device=form.device
    )
    made.form, made.origin = form, origin
    if outputs:
        made.outputs = outputs
    return made


def take_place(absent: Tensor, value: Tensor) -> bool:
    """Let an absent tensor be one that has values, for all who have the object; return whether that could be done.

    It can't where a graph or a view of torch's refers to it.
    """
    for _ in range(2):  # torch's cache of what operations on fake tensors return refers to the first of its kind
        alias = value.view_as(value)  # the value itself stays where gradients come together
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(absent, alias)  # type: ignore[no-untyped-call]
            return True
    return False


def outputs_behind(leaves: Iterable[Any]) -> tuple[ModuleOutput, ...]:
    """Return from which outputs of modules absent tensors could be computed, as far as a dry run has told."""
    absent = (leaf for leaf in leaves if isinstance(leaf, AbsentTensor))
    return tuple(dict.fromkeys(output for leaf in absent for output in leaf.outputs))


def is_absent(tensor: Tensor) -> bool:
    """Return whether a tensor's values are absent."""
    return isinstance(tensor, AbsentTensor)


def read_error(message: str, what: str, outputs: tuple[ModuleOutput, ...]) -> AbsentValueError:
    """Return the error of a read, which keeps for a dry run what it was; see `read_by`.

    Args:
        message: For the user.
        what: What has read which value.
        outputs: From what the value could be computed.
    """
    error: Any = AbsentValueError(message)  # of that class itself, as errors of other ranks are raised by their class
    error.read = what, outputs
    errors = _errors.get()
    if errors is not None:
        errors.append(error)
    return error  # type: ignore[no-any-return]


def read_by(error: AbsentValueError) -> tuple[str, tuple[ModuleOutput, ...]]:
    """Return what has read which value, and from what that could be computed."""
    found: tuple[str, tuple[ModuleOutput, ...]] = getattr(error, "read", (str(error), ()))
    return found


def refuse(what: str, given: Any) -> NoReturn:
    """Raise the error of a read.

    Args:
        what: What reads the values.
        given: What it was called with.

    Raises:
        AbsentValueError: Always.
    """
    leaves = pytree.tree_leaves(given)
    remedy = (
        "No rank of a model that is cut into stages has all of it. Run batches through `booster.execute_pipeline`, and "
        "read or write whole tensors by `booster_runtime.gathered`, or in the files that `booster.save_model` writes."
        if _errors.get() is None
        else "The example at `boost` did not show that it is needed here. Pass an `example_batch` like the batches "
        "that are run (with the same entries and flags), leave out what asks for it, or use `pp_size=1`."
    )
    read = f"`{what}` needs values of {_first_origin(leaves)}"
    msg = f"{read}, which another pipeline stage has. {remedy}"
    raise read_error(msg, read, outputs_behind(leaves))


def _refuse_write(func: Any, leaves: Sequence[Any]) -> NoReturn:
    """Raise for a write of absent values into memory that has some: views of it would be as they were."""
    origin, name = _first_origin(leaves), name_of_operation(func)
    msg = (
        f"The model writes values of {origin}, which another pipeline stage has, into a tensor that this one has (by "
        f"`{name}`, outside of its layers). Let it make a new tensor, do so inside of a layer, or use `pp_size=1`."
    )
    raise read_error(msg, f"`{name}` writes values of {origin} into a known tensor", outputs_behind(leaves))


def name_of_operation(func: Any) -> str:
    """Return what an operation is called in errors."""
    name: str = getattr(func, "__name__", str(func)).partition(".")[0]
    return "item" if name == "_local_scalar_dense" else name


def _first_origin(leaves: Iterable[Any]) -> str:
    return next((leaf.origin for leaf in leaves if isinstance(leaf, AbsentTensor)), "")


class _Result(NamedTuple):
    """What an operation returns for arguments of some forms."""

    leaves: tuple[Any, ...]  # forms of tensors; `_Given` for arguments; plain values
    structure: pytree.TreeSpec


class _Given(NamedTuple):
    place: int


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return which arguments an operation writes to, by place and name."""
    arguments = func._schema.arguments  # noqa: SLF001 - torch tells it nowhere else
    return tuple(
        (place, each.name)
        for place, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


class ResultForms:
    """Finds out what operations return for absent arguments, on fake tensors; once for each form of arguments."""

    def __init__(self) -> None:
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, _Result] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation returns, with absent tensors in it.

        Args:
            func: The operation; called with fake tensors.
            args: Its arguments, of which some are absent.
            kwargs: Those by name.

        Raises:
            AbsentValueError: If the result depends on absent values in another way than by its own values, or a known
                tensor would be written to.
        """
        if func.overloadpacket in _FORM_OF_FIRST and isinstance(args[0], AbsentTensor):
            form = ActivationMeta.of(args[0])
            return func(form.empty("meta"), *args[1:], **{**kwargs, "device": kwargs.get("device") or form.device})
        leaves, structure = pytree.tree_flatten((args, kwargs))
        origin, outputs = _first_origin(leaves), outputs_behind(leaves)
        for place, name in _written(func):
            for target in pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
                if isinstance(target, AbsentTensor):
                    target.outputs = outputs
                elif not _is_trial.get():
                    _refuse_write(func, leaves)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_trial.get():
            self._draw(func, leaves, structure)
        key = func, structure, *map(_described, leaves)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._find(func, leaves, structure)
        made = [
            absent_like(leaf, origin, outputs)
            if isinstance(leaf, ActivationMeta)
            else leaves[leaf.place]
            if isinstance(leaf, _Given)
            else leaf
            for leaf in found.leaves
        ]
        return pytree.tree_unflatten(made, found.structure)

    @staticmethod
    def _draw(func: Any, leaves: Sequence[Any], structure: pytree.TreeSpec) -> None:
        """Draw as many random numbers as a stage that has the values does."""
        given = [
            torch.ones_like(ActivationMeta.of(leaf).empty("meta"), device=leaf.device)
            if isinstance(leaf, AbsentTensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(given, structure)
        func(*args, **kwargs)

    def _find(self, func: Any, leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Result:
        try:
            return self._on_fakes(func, leaves, structure)
        except AbsentValueError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an operation raises that asks a fake tensor for its values
            return self._on_trials(func, leaves, structure, error)

    def _on_fakes(self, func: Any, leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Result:
        given: list[Any] = []
        with torch.inference_mode(mode=False), torch.no_grad(), quiet_fakes(), self._fakes:
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    given.append(leaf)
                elif leaf.layout is torch.strided:
                    given.append(ActivationMeta.of(leaf).empty())
                else:
                    given.append(self._fakes.from_tensor(leaf.detach()))
            return self._run(func, given, leaves, structure)

    def _on_trials(self, func: Any, leaves: Sequence[Any], structure: pytree.TreeSpec, error: Exception) -> _Result:
        """Run an operation on several values; what it returns depends on known ones alone if it has one form."""
        found = []
        for values in _TRIALS:
            given = [
                (values(ActivationMeta.of(leaf).empty()) if isinstance(leaf, AbsentTensor) else leaf.detach().clone())
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            try:
                with torch.inference_mode(mode=False), torch.no_grad():
                    found.append(self._run(func, given, leaves, structure))
            except Exception:  # noqa: BLE001 - it may be the values' fault
                break
        if len(found) < len(_TRIALS) or any(each != found[0] for each in found):
            try:
                refuse(name_of_operation(func), leaves)
            except AbsentValueError as refusal:
                raise refusal from error
        return found[0]

    @staticmethod
    def _run(func: Any, given: Sequence[Any], leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Result:
        args, kwargs = pytree.tree_unflatten(given, structure)
        results, form = pytree.tree_flatten(func(*args, **kwargs))
        index_of = {id(each): index for index, each in enumerate(given) if isinstance(each, Tensor)}
        described: list[Any] = []
        for leaf in results:
            index = index_of.get(id(leaf))
            if index is not None:
                if ActivationMeta.of(leaf) != ActivationMeta.of(leaves[index]):
                    refuse(name_of_operation(func), leaves)  # it changes the tensor's form in place
                described.append(_Given(index))
            else:
                described.append(ActivationMeta.of(leaf) if isinstance(leaf, Tensor) else leaf)
        return _Result(tuple(described), form)


def _described(leaf: Any) -> Any:
    """Return what a result's form depends on of an argument."""
    if isinstance(leaf, Tensor):
        return ActivationMeta.of(leaf), isinstance(leaf, AbsentTensor)
    return type(leaf), str(leaf) if isinstance(leaf, slice) else leaf


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging what a fake run can't do; the real run follows."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
