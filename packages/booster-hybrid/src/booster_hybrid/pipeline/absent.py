"""Tensors whose values a stage can't know: what layers and parameters of other stages make.

An absent tensor has shape, strides, dtype and device, and no storage. A `StageForwardMode` lets it through the model's
code outside of the layers, by the form of what each function would return; anywhere else, and wherever its values
decide something, it raises `AbsentValueError`. The other kind of absent values, those that an engine brings when they
are used (`booster_runtime.memory`), is known here.
"""

from __future__ import annotations

import contextlib
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from booster_core.errors import AbsentValueError
from booster_runtime.data import fields_of, with_fields

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
    torch.Size,
    slice,
    type(Ellipsis),
)
_DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
_TRIALS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.zeros_like,
    torch.ones_like,
    lambda like: torch.arange(like.numel(), device=like.device).reshape(like.shape).to(like.dtype),
)
"""Values that absent ones are tried with, where the shape of a result may depend on known values alone."""


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
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> ActivationMeta:
        """Return a tensor's form."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the public context is for subclasses alone
            stride = tensor.stride() if tensor.layout is torch.strided else ()
            return cls(tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> Tensor:
        """Return a tensor of this form, with memory that nobody has written to."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class AbsentTensor(Tensor):
    """A tensor without values; see `absent_like`."""

    form: ActivationMeta
    origin: str
    outputs: tuple[ModuleOutput, ...] = ()  # in a dry run: from what its values could be computed
    arrived: Tensor | None = None  # its values, where a stage has received them as an argument of its first layer
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - as torch's own wrappers

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it takes by position alone
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Describe a tensor, or refuse to compute with it."""
        del types
        if func is not torch.ops.aten.detach.default:
            refuse(func.__name__.partition(".")[0], (args, kwargs))
        made = absent_like(args[0].form._replace(requires_grad=False), args[0].origin, args[0].outputs)
        made.arrived = args[0].arrived  # a checkpoint detaches what it runs again with
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not annotated
        """Return a description, which has no values."""
        del tensor_contents
        return f"<absent {tuple(self.form.shape)} {self.form.dtype}: {self.origin}>"

    def __deepcopy__(self, memo: object) -> AbsentTensor:
        """Return another one of the same form."""
        return absent_like(self.form, self.origin, self.outputs)

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


_is_trial: ContextVar[bool] = ContextVar("booster absent trial", default=False)
_errors: ContextVar[list[AbsentValueError] | None] = ContextVar("booster absent errors", default=None)
"""Where the errors of a run are noted, as the model's own code may catch them."""


@contextlib.contextmanager
def noting_errors(errors: list[AbsentValueError]) -> Iterator[None]:
    """Add the errors of reads inside to a list."""
    token = _errors.set(errors)
    try:
        yield
    finally:
        _errors.reset(token)


@contextlib.contextmanager
def in_trial() -> Iterator[None]:
    """Let a call inside show what it would return: its reads are no errors, and addresses are aligned."""
    token = _is_trial.set(True)
    try:
        with noting_errors([]):
            yield
    finally:
        _is_trial.reset(token)


def is_plain(leaf: Any) -> bool:
    """Return whether something in a call's arguments or results is a tensor, or can't change."""
    return isinstance(leaf, (Tensor, *_PLAIN))


def absent_like(form: ActivationMeta, origin: str, outputs: tuple[ModuleOutput, ...] = ()) -> AbsentTensor:
    """Return a tensor without values.

    Args:
        form: Its shape, strides, dtype, device, and whether it says of itself that it has a gradient.
        origin: What has the values, for errors: ``"layer 'layers.0'"``.
        outputs: In a dry run: from what the values could be computed.
    """
    made: AbsentTensor = Tensor._make_wrapper_subclass(  # noqa: SLF001 - documented for this
        AbsentTensor,
        form.shape,
        strides=form.stride,
        dtype=form.dtype,
        device=form.device,
        requires_grad=form.requires_grad and (form.dtype.is_floating_point or form.dtype.is_complex),
    )
    made.form, made.origin = form, origin
    if outputs:
        made.outputs = outputs
    return made


def origin_of(tensor: Tensor) -> str | None:
    """Return what made a tensor's values absent; ``None`` for a tensor that has them."""
    return tensor.origin if isinstance(tensor, AbsentTensor) else None


def outputs_behind(leaves: Iterable[Any]) -> tuple[ModuleOutput, ...]:
    """Return from which outputs of modules absent tensors could be computed, as far as a dry run has told."""
    absent = (leaf for leaf in leaves if isinstance(leaf, AbsentTensor))
    return tuple(dict.fromkeys(output for leaf in absent for output in leaf.outputs))


def is_absent(tensor: Tensor) -> bool:
    """Return whether a tensor's values are absent."""
    return isinstance(tensor, AbsentTensor)


def has_absent(value: Any) -> bool:
    """Return whether there is an absent tensor in a nest of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return is_absent(value)
    if isinstance(value, (tuple, list)):
        return any(map(has_absent, value))
    return isinstance(value, dict) and any(map(has_absent, value.values()))


def _may_have_arrived(value: Any) -> bool:
    """Return whether there may be an absent tensor in something, at a fraction of the cost of looking at all of it."""
    if isinstance(value, (tuple, list)):
        return any(map(_may_have_arrived, value))
    if isinstance(value, dict):
        return any(map(_may_have_arrived, value.values()))
    if isinstance(value, (Tensor, *_PLAIN)):
        return isinstance(value, AbsentTensor)
    return type(value) in pytree.SUPPORTED_NODES or fields_of(value) is not None


def with_arrived(value: Any) -> Any:
    """Return a nest in which absent tensors whose values have arrived are those; opened as by `tensors_of`."""
    if isinstance(value, (Tensor, tuple, list, dict)) and not _may_have_arrived(value):
        return value

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            arrived = leaf.arrived if isinstance(leaf, AbsentTensor) else None
            return leaf if arrived is None else arrived
        fields = fields_of(leaf)
        if fields is None and leaf is value:
            fields = getattr(leaf, "__dict__", None)
        return with_fields(leaf, {name: with_arrived(each) for name, each in fields.items()}) if fields else leaf

    return pytree.tree_map(replaced, value)


def read_error(message: str, what: str, outputs: tuple[ModuleOutput, ...]) -> AbsentValueError:
    """Return the error of a read, which keeps for a dry run what it was; see `read_by`.

    Args:
        message: For the user.
        what: What has read which value.
        outputs: From what the value could be computed.
    """
    error: Any = AbsentValueError(message)  # of that class itself, as errors of other ranks are raised by their class
    error.read = what, outputs
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
    origin = _first_origin(leaves)
    errors = _errors.get()
    remedy = (
        "Run batches through `booster.execute_pipeline`: no rank of a model that is cut into stages has all of it."
        if errors is None
        else "The example at `boost` did not show that it is needed here. Pass an `example_batch` like the batches "
        "that are run (with the same entries and flags), leave out what asks for it, or use `pp_size=1`."
    )
    read = f"`{what}` needs values of {origin}"
    error = read_error(f"{read}, which another pipeline stage has. {remedy}", read, outputs_behind(leaves))
    if errors is not None:
        errors.append(error)
    raise error


def _first_origin(leaves: Iterable[Any]) -> str:
    origins = (origin_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    return next((origin for origin in origins if origin is not None), "")


class _Result(NamedTuple):
    """What a function returns for arguments of some forms."""

    leaves: tuple[Any, ...]  # forms of tensors; `_Given` for arguments; plain values
    structure: pytree.TreeSpec
    written: tuple[int, ...]  # which of the arguments' leaves it writes to


class _Given(NamedTuple):
    place: int


class MetaCache:
    """Finds out what functions return for absent arguments, on fake tensors; once for each form of arguments.

    Args:
        is_dry: Whether all tensors are fake already.
    """

    def __init__(self, *, is_dry: bool = False) -> None:
        self._fakes: Any = contextlib.nullcontext() if is_dry else FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, _Result] = {}

    def result(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        write: Callable[[Callable[..., Any], str, tuple[ModuleOutput, ...]], None],
    ) -> Any:
        """Return what a function returns, with absent tensors in it.

        Args:
            function: Called with fake tensors.
            args: Its arguments, of which some are absent.
            kwargs: Those by name.
            write: Called with the function, and where values are from, for each known tensor that it would write to.

        Raises:
            AbsentValueError: If the result depends on absent values in another way than by its own values.
        """
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        origin, outputs = _first_origin(leaves), outputs_behind(leaves)
        key = self._key(function, leaves, structure)
        found = None if key is None else self._known.get(key)
        if found is None:
            found = self._find(function, leaves, structure)
            if key is not None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        for index in found.written:
            if not isinstance(leaves[index], AbsentTensor):
                write(function, origin, outputs)
            elif outputs:
                leaves[index].outputs = outputs
        made = [
            absent_like(leaf, origin, outputs)
            if isinstance(leaf, ActivationMeta)
            else leaves[leaf.place]
            if isinstance(leaf, _Given)
            else leaf
            for leaf in found.leaves
        ]
        return pytree.tree_unflatten(made, found.structure)

    def _key(self, function: Callable[..., Any], leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
        described: list[Any] = []
        device = "cpu"
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                form = ActivationMeta.of(leaf)
                device = form.device.type
                described.append((form, is_absent(leaf)))
            elif isinstance(leaf, _PLAIN):
                described.append((type(leaf), str(leaf) if isinstance(leaf, slice) else leaf))
            else:
                return None
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return function, structure, casts, torch.is_grad_enabled(), torch.get_default_dtype(), *described

    def _find(self, function: Callable[..., Any], leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Result:
        try:
            found = self._on_fakes(function, leaves, structure)
        except AbsentValueError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a function raises that asks a fake tensor for its values
            found = self._on_trials(function, leaves, structure, error)
        if torch.is_grad_enabled() and function not in _DETACHING and any(map(_has_gradient, leaves)):
            with_gradient = (
                leaf._replace(requires_grad=True) if isinstance(leaf, ActivationMeta) else leaf for leaf in found.leaves
            )
            return found._replace(leaves=tuple(with_gradient))
        return found

    def on_zeros(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function returns if all absent values are zero; tensors in it are absent."""
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        origin, outputs = _first_origin(leaves), outputs_behind(leaves)
        given = [
            (torch.zeros_like(leaf.form.empty()) if isinstance(leaf, AbsentTensor) else leaf.detach().clone())
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(given, structure)
        with torch.no_grad():
            output = function(*args, **kwargs)
        back = {id(each): leaf for each, leaf in zip(given, leaves, strict=True)}
        return pytree.tree_map_only(
            Tensor, lambda tensor: back.get(id(tensor), absent_like(ActivationMeta.of(tensor), origin, outputs)), output
        )

    def _on_fakes(self, function: Callable[..., Any], leaves: Sequence[Any], structure: pytree.TreeSpec) -> _Result:
        given: list[Any] = []
        with torch.inference_mode(mode=False), torch.no_grad(), quiet_fakes(), self._fakes:
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    given.append(leaf)
                elif leaf.layout is torch.strided:
                    given.append(ActivationMeta.of(leaf).empty())
                else:
                    given.append(self._fakes.from_tensor(leaf.detach()))
            return self._described(function, given, leaves, structure)

    def _on_trials(
        self, function: Callable[..., Any], leaves: Sequence[Any], structure: pytree.TreeSpec, error: Exception
    ) -> _Result:
        """Run a function on several values; what it returns depends on known ones alone if it has one form."""
        found = []
        for values in _TRIALS:
            given = [
                (values(leaf.form.empty()) if isinstance(leaf, AbsentTensor) else leaf.detach().clone())
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            try:
                with torch.inference_mode(mode=False), torch.no_grad():
                    found.append(self._described(function, given, leaves, structure))
            except Exception:  # noqa: BLE001 - it may be the values' fault
                break
        if len(found) < len(_TRIALS) or any(each != found[0] for each in found):
            refuse_because(function, leaves, error)
        return found[0]

    @staticmethod
    def _described(
        function: Callable[..., Any], given: Sequence[Any], leaves: Sequence[Any], structure: pytree.TreeSpec
    ) -> _Result:
        versions = _versions(given)
        args, kwargs = pytree.tree_unflatten(given, structure)
        output = function(*args, **kwargs)
        index_of = {id(each): index for index, each in enumerate(given) if isinstance(each, Tensor)}
        results, form = pytree.tree_flatten(output)
        described: list[Any] = []
        for leaf in results:
            if isinstance(leaf, Tensor):
                index = index_of.get(id(leaf))
                if index is not None:
                    if ActivationMeta.of(leaf)[:4] != ActivationMeta.of(leaves[index])[:4]:
                        refuse(_name(function), leaves)  # it changes the tensor's form in place
                    described.append(_Given(index))
                else:
                    described.append(ActivationMeta.of(leaf))
            elif isinstance(leaf, _PLAIN):
                described.append(leaf)
            else:
                refuse(_name(function), leaves)
        written = tuple(
            index for index, (one, two) in enumerate(zip(versions, _versions(given), strict=True)) if one != two
        )
        return _Result(tuple(described), form, written)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _versions(values: Iterable[Any]) -> list[int]:
    return [each._version if isinstance(each, Tensor) else 0 for each in values]  # noqa: SLF001 - torch tells it nowhere else


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))


def refuse_because(function: Callable[..., Any], given: Any, error: Exception) -> NoReturn:
    """Raise the error of a function that reads absent values, with what it raised on fake ones as its cause."""
    try:
        refuse(_name(function), given)
    except AbsentValueError as refusal:
        raise refusal from error


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
