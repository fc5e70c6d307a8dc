"""`ShardedParameter`: a sharded parameter that a script writes as it writes the parameters of one process.

torch's DTensor drops some writes in silence: values that are assigned to ``data``, and elements of a sharded dimension.
It refuses others, such as a copy from a plain tensor, and lets each rank draw the same random numbers for its rows.
Here an operation in place runs on this rank's rows where it computes each element by itself, and otherwise on the whole
parameter, of which each rank takes its rows.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_fsdp._torch_private import calls_dispatch_of_subclasses
from booster_runtime.sharding import local_of, send_first, sharded_like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

_ELEMENTWISE = frozenset(
    f"{name}_"
    for name in (
        *("abs", "add", "addcdiv", "addcmul", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "copy", "div"),
        *("divide", "erfinv", "exp", "fill", "floor", "lerp", "log", "mul", "multiply", "nan_to_num", "neg", "pow"),
        *("reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sqrt", "square", "sub", "subtract", "tanh"),
        *("true_divide", "trunc", "zero"),
    )
)
"""Operations in place whose result at an element depends on that element of each operand."""
_NOT_WRITES = frozenset(
    f"{name}_"
    for name in (
        *("as_strided", "detach", "rename", "requires_grad", "resize", "resize_as", "set", "share_memory", "squeeze"),
        *("sparse_resize", "sparse_resize_and_clear", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"),
    )
)
"""Operations in place that change no values."""
_TENSORS = (torch.TensorType, torch.ListType)


class _Sharded(DTensor):
    """A DTensor that knows where it comes from: what is computed from it does, too.

    So numbers that are drawn into a tensor like a parameter are rank 0's, as those that are drawn into the parameter.
    An operation that torch can't run on shards runs on whole tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 - as in torch's class

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the operation
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs, schema = kwargs or {}, func._schema  # noqa: SLF001 - which has no public name
        if torch.Tag.inplace_view in func.tags:
            _refuse_shape(func)
        if any(each.is_out for each in schema.arguments):
            return _run_whole(func, args, kwargs)
        if schema.returns and not any(isinstance(each.type, _TENSORS) for each in schema.returns):
            whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole_of, (args, kwargs))
            return func(*whole_args, **whole_kwargs)  # a number, of all ranks' rows
        plain_args, plain_kwargs = pytree.tree_map_only(_Sharded, _unwrapped, (args, kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except torch.OutOfMemoryError:  # of this rank alone
            raise
        except (NotImplementedError, RuntimeError) as error:
            is_mixed = any(map(_is_plain, pytree.tree_leaves((args, kwargs))))
            if is_mixed and (where := _calling_method()) is not None:
                _refuse_mix(where, func, error)
            if is_mixed or schema.is_mutable:
                raise
            return _run_whole(func, args, kwargs)
        if schema.is_mutable:
            return result
        is_view = any(each.alias_info is not None for each in schema.returns)
        return pytree.tree_map_only(DTensor, functools.partial(_view_of, args[0]) if is_view else _fresh, result)


class ShardedParameter(_Sharded):
    """A parameter of which each rank holds its rows; made by `shard_parameter`.

    Everything that reads it gets what torch's DTensor gives. ``data`` is another one over the same rows.

    Attributes:
        num_writes: How often a script has written values by an operation in place, through ``data`` too.
    """

    _written: list[int]

    @property
    def num_writes(self) -> int:
        """The number of writes; one operation may count more than once."""
        return self._written[0] + self._version

    @property
    def data(self) -> Tensor:
        """The same rows without autograd, as ``Tensor.data``; an assignment copies the values."""
        return _over_rows(self, requires_grad=False)

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            cast("Any", self).copy_(values)

    def __setitem__(self, index: Any, values: Any) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            super().__setitem__(index, values)  # raises what it does for any parameter
        _write_whole(self, "__setitem__", (index, values), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        make: Any = DTensor
        copied = make(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        made = shard_parameter(copied)
        memo[id(self)] = made
        return made

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook on the gradient, which torch's FSDP would never call.

        Raises:
            ConfigError: Always.
        """
        del hook
        msg = (
            "A hook on the gradient of a sharded parameter would never run: FSDP computes with gathered copies. Change "
            "gradients after `backward`, by `booster_runtime.full_gradient` and `set_full_gradient`, or scale the "
            "loss, or use plugin='zero'."
        )
        raise ConfigError(msg)

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook on the gradient, as `register_hook` does.

        Raises:
            ConfigError: Always.
        """
        self.register_hook(hook)


class _Fresh(_Sharded):
    """A tensor that was computed from a sharded parameter, in memory of its own; it is written as the parameter is."""

    _written: list[int]

    def __setitem__(self, index: Any, values: Any) -> None:
        ShardedParameter.__setitem__(cast("ShardedParameter", self), index, values)


class _View(_Sharded):
    """A view of a sharded parameter, which may be a copy of other ranks' elements: what is written there is lost."""

    def __setitem__(self, index: Any, values: Any) -> None:
        del index, values
        _refuse_write(self)


def shard_parameter(parameter: DTensor) -> nn.Parameter:
    """Return a parameter over the rows of one that ``fully_shard`` has made."""
    made = _over_rows(parameter, requires_grad=parameter.requires_grad)
    made._is_param = True  # noqa: SLF001 - by which torch knows parameters of other classes
    return cast("nn.Parameter", made)


def _over_rows(parameter: DTensor, *, requires_grad: bool) -> ShardedParameter:
    make: Any = ShardedParameter
    made: ShardedParameter = make(parameter._local_tensor.detach(), parameter._spec, requires_grad=requires_grad)  # noqa: SLF001
    made._written = parameter._written if isinstance(parameter, ShardedParameter) else [0]  # noqa: SLF001
    return made


_GRAD = torch.Tensor.grad
"""Read several times a step for each parameter; it is what a script or backward has put there."""


def _run_function(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Do for a function what `_Sharded.__torch_dispatch__` does for an operation, where torch does not call that."""
    del cls, types
    kwargs, name = kwargs or {}, getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
        if name == "__set__" or getattr(func, "__self__", None) is _GRAD:
            return func(*args, **kwargs)
        if any(torch.Tag.inplace_view in each.tags for each in _overloads(name)):
            _refuse_shape(f"`{name}`")
        if isinstance(kwargs.get("out"), DTensor):
            return _run_into(func, args, kwargs, ["out"])
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            is_mixed = any(map(_is_plain, pytree.tree_leaves((args, kwargs))))
            if is_mixed and (where := _calling_method()) is not None:
                _refuse_mix(where, func, error)
            raise
        if not isinstance(result, (torch.Tensor, tuple, list)):  # such as most attributes
            return result
        leaves = [each for each in pytree.tree_leaves(result) if isinstance(each, DTensor)]
        if any(each.requires_grad or isinstance(each, _Sharded) for each in leaves):
            return result
        is_view = name == "__getitem__" or _returns_views(name)
        return pytree.tree_map_only(DTensor, functools.partial(_view_of, args[0]) if is_view else _fresh, result)


@functools.cache
def _returns_views(name: str) -> bool:
    """Return whether an operation returns views of what it is given."""
    returned = [each for overload in _overloads(name) for each in overload._schema.returns]  # noqa: SLF001
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


@functools.cache
def _overloads(name: str) -> tuple[Any, ...]:
    packet = getattr(torch.ops.aten, name, None)
    return () if packet is None else tuple(getattr(packet, each) for each in packet.overloads())


if not calls_dispatch_of_subclasses():
    _Sharded.__torch_function__ = classmethod(_run_function)  # type: ignore[assignment]


def _unwrapped(tensor: DTensor) -> DTensor:
    """Return the same rows as torch's own DTensor."""
    make: Any = DTensor
    made: DTensor = make(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)  # noqa: SLF001
    return made


def _fresh(tensor: DTensor) -> DTensor:
    make: Any = _Fresh
    made: _Fresh = make(tensor._local_tensor, tensor._spec, requires_grad=False)  # noqa: SLF001
    made._written = [0]  # noqa: SLF001
    return made


def _view_of(base: Any, view: DTensor) -> DTensor:
    """Return a view that refuses to be written to, unless it is of the same rows."""
    if _is_alike(base, view) and not isinstance(base, _View):
        made: Any = _fresh(view)
        if isinstance(base, (ShardedParameter, _Fresh)):
            made._written = base._written  # noqa: SLF001
        return cast("DTensor", made)
    make: Any = _View
    return cast("DTensor", make(view._local_tensor, view._spec, requires_grad=False))  # noqa: SLF001


def _is_plain(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and not isinstance(operand, DTensor) and operand.dim() > 0


def _run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on whole tensors, with rank 0's result for all.

    Collective: every rank of the world.
    """
    if outputs := [each.name for each in func._schema.arguments if each.is_out]:  # noqa: SLF001
        return _run_into(func, args, kwargs, outputs)
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole_of, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    first = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DTensor))
    mesh = first.device_mesh

    def replicate(values: Tensor) -> DTensor:
        sent = values.to(mesh.device_type).contiguous()
        send_first([sent])
        return _fresh(DTensor.from_local(sent, mesh, [Replicate()] * mesh.ndim, run_check=False))

    return pytree.tree_map_only(torch.Tensor, replicate, result)


def _run_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[str]) -> Any:
    """Run an operation on whole tensors that writes into some of its arguments.

    Collective: every rank of the world.
    """
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, _whole_of, (args, kwargs))
    func(*whole_args, **whole_kwargs)
    for name in outputs:
        _take(kwargs[name], whole_kwargs[name])
        _note_write(kwargs[name])
    return kwargs[outputs[0]] if len(outputs) == 1 else tuple(kwargs[name] for name in outputs)


def _calling_method() -> str | None:
    """Return the method of the user's module that computes; ``None`` where it is called by a boosted model's forward.

    That one says itself what to do.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to a frame
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        package = type(module).__module__.partition(".")[0]
        if isinstance(module, nn.Module) and package != "torch":
            return None if package == "booster_fsdp" else f"`{type(module).__name__}.{frame.f_code.co_name}`"
    return None


def _refuse_mix(where: str, func: Any, error: Exception) -> NoReturn:
    """Raise that a module has met sharded parameters outside of its forward, and name its method.

    Raises:
        ConfigError: Always.
    """
    msg = (
        f"{where} met a sharded parameter together with a plain tensor, in {func}. Parameters are whole during forward "
        "only: let a method of the model that was boosted call it, and name that in `forward_methods=` of "
        "`TorchFSDPPlugin`, or surround it by `with model.whole_parameters():`."
    )
    raise ConfigError(msg) from error


def _refuse_shape(func: Any) -> NoReturn:
    msg = (
        f"{func} changes the shape of what was made from a sharded parameter, in place, which shards can't follow. "
        "Surround what does so, such as `torch.nn.init.orthogonal_` of a matrix that is wider than high, by "
        "`with booster_runtime.gathered(booster, model, [name], writes=True):`."
    )
    raise ConfigError(msg)


def _write(self: ShardedParameter, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operation in place on this rank's rows, or on the whole parameter.

    Collective: every rank of the world, unless the operation is elementwise and its operands are sharded alike.
    """
    if torch.is_grad_enabled() and self.requires_grad:
        return getattr(DTensor, name)(self, *args, **kwargs)  # raises what it does for any parameter
    if name in _ELEMENTWISE and all(_is_alike(self, each) for each in (*args, *kwargs.values())):
        getattr(self._local_tensor, name)(*map(_rows_of, args), **{key: _rows_of(each) for key, each in kwargs.items()})
        _note_write(self)
    else:
        _write_whole(self, name, args, kwargs)
    return self


def _write_whole(self: ShardedParameter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an operation in place on a whole copy, and take this rank's rows of rank 0's result.

    Collective: every rank of the world.
    """
    with torch.no_grad():
        whole = _whole_of(self)
        getattr(whole, name)(*map(_whole_of, args), **{key: _whole_of(each) for key, each in kwargs.items()})
        _take(self, whole)
    _note_write(self)


def _take(self: DTensor, whole: Tensor) -> None:
    """Take this rank's rows of rank 0's values.

    Collective: every rank of the world.
    """
    sent = whole.to(self.device_mesh.device_type).contiguous()
    send_first([sent])
    self._local_tensor.copy_(local_of(sharded_like(sent.to(whole.device), self)))


def _note_write(self: ShardedParameter) -> None:
    if self.requires_grad:  # what autograd compares; writes through `data` leave it as it is
        torch.autograd.graph.increment_version(self)
    else:
        self._written[0] += 1


def _is_alike(self: ShardedParameter, operand: Any) -> bool:
    """Return whether this rank's rows of an operand are those that belong to the parameter's."""
    if isinstance(operand, DTensor):
        return operand.shape == self.shape and operand._spec.placements == self._spec.placements  # noqa: SLF001
    return not isinstance(operand, torch.Tensor) or not operand.dim()


def _rows_of(operand: Any) -> Any:
    return operand._local_tensor if isinstance(operand, DTensor) else operand  # noqa: SLF001 - `to_local` builds a graph node


def _whole_of(operand: Any) -> Any:
    """Return a copy of a DTensor's whole values, on the device of its rows; other operands as they are."""
    if not isinstance(operand, DTensor):
        return operand
    home = operand._local_tensor.device  # noqa: SLF001
    sharded: Any = _unwrapped(operand).detach()
    # The process group has no backend for offloaded rows.
    return sharded.to(operand.device_mesh.device_type).full_tensor().to(home).clone()


def _refuse_write(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    del self, args, kwargs
    msg = (
        "A view of a sharded parameter was written to, as in `parameter[0].zero_()` or `parameter.view(-1).mul_(2)`: "
        "it may be a copy of what other ranks hold, and the values would be lost. Write to the parameter itself, as in "
        "`parameter[0] = 0`, or use `booster_runtime.gathered(booster, model, [name], writes=True)`."
    )
    raise ConfigError(msg)


def _define(kind: type, operations: Mapping[str, str], function: Callable[..., Any]) -> None:
    """Let the methods of a class, by name, call a function with the operation that each stands for."""
    for name, operation in operations.items():
        setattr(kind, name, _method(name, operation, function))


def _method(name: str, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.Tensor, name), ("__name__", "__doc__"))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, operation, *args, **kwargs)

    return method


_WRITES = [
    name
    for name in dir(torch.Tensor)
    if name.endswith("_")
    and not name.startswith("_")
    and name not in _NOT_WRITES
    and callable(getattr(torch.Tensor, name))
]
_OPERATORS = {"__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_", "__ipow__": "pow_"}
for _kind, _function in ((ShardedParameter, _write), (_Fresh, _write), (_View, _refuse_write)):
    _define(_kind, {name: name for name in _WRITES} | _OPERATORS, _function)
