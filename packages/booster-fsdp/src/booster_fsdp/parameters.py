"""`ShardedParameter`: a sharded parameter that a script writes as it writes the parameters of one process.

torch's DTensor drops some writes in silence: values that are assigned to ``data``, and elements of a sharded dimension.
It refuses others, such as a copy from a plain tensor, and lets each rank draw the same random numbers for its rows.
Here an operation in place runs on this rank's rows where it computes each element by itself, and otherwise on the whole
parameter, of which each rank takes its rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError
from booster_runtime.sharding import local_of, send_first, sharded_like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
_VIEWS = (
    *("__getitem__", "chunk", "diagonal", "expand", "flatten", "narrow", "permute", "ravel", "reshape", "select"),
    *("split", "squeeze", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
)


class ShardedParameter(DTensor):
    """A parameter of which each rank holds its rows; made by `shard_parameter`.

    Everything that reads it gets what torch's DTensor gives. ``data`` is another one over the same rows.

    Attributes:
        num_writes: How often a script has written values by an operation in place, through ``data`` too.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 - as in torch's class
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


class _View(DTensor):
    """A view of a sharded parameter, which may be a copy of other ranks' elements: what is written there is lost."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 - as in torch's class

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
        sent = whole.to(self.device_mesh.device_type).contiguous()
        send_first([sent])
        self._local_tensor.copy_(local_of(sharded_like(sent.to(whole.device), self)))
    _note_write(self)


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
    sharded: Any = operand.detach()
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


def _view(self: ShardedParameter, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return a view that refuses to be written to; where autograd is on, torch refuses that itself."""
    result = getattr(DTensor, name)(self, *args, **kwargs)
    if torch.is_grad_enabled() and self.requires_grad:
        return result
    return type(result)(map(_read_only, result)) if isinstance(result, (list, tuple)) else _read_only(result)


def _read_only(view: DTensor) -> DTensor:
    make: Any = _View
    made: DTensor = make(view._local_tensor, view._spec, requires_grad=False)  # noqa: SLF001
    return made


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
for _kind, _function in ((ShardedParameter, _write), (_View, _refuse_write)):
    _define(_kind, {name: name for name in _WRITES} | _OPERATORS, _function)
_define(ShardedParameter, {name: name for name in _VIEWS}, _view)
