"""`ShardedTensor`: torch's DTensor, without what it does in silence.

Numbers that a script reads from it are those of the whole tensor, not of this rank's rows. Writes that torch would drop
raise, and so does what torch can't do on shards, with the way that works. Everything else is torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.ranks import NamedCall
from booster_runtime.memory import values_of
from booster_runtime.sharding import taken_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

GRADIENT: Any = torch.Tensor.grad
"""A tensor's gradient as torch keeps it, past what `ShardedTensor` says of it."""
_TENSORS = (torch.TensorType, torch.ListType)


class ShardedTensor(DTensor):
    """A sharded parameter, its gradient, or what a script computes from them.

    Attributes:
        is_copy: Whether it holds copies of elements of a parameter, so that nothing would see a write.
        writes: How often scripts have written to the tensors that share this list, as its only element.
        unreduced: What of the model has gradients that are not reduced yet.
        on_drop: Called when a parameter's gradient is set to ``None`` while there is such.
        on_absent: Called when a parameter's gradient is read, and there is none here; raises where it is among those.
        kind: The class that a parameter had in the user's model.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 - as in torch's class
    is_copy: bool
    writes: list[int]
    unreduced: Collection[Any] = ()
    on_drop: Callable[[], None]
    on_absent: Callable[[], None]
    kind: type = nn.Parameter

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the operation
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as torch does on DTensors.

        Raises:
            ConfigError: If torch can't, or what it writes would be lost.

        Collective: every rank of the world where it returns numbers, or torch needs other ranks' rows.
        """
        del types
        kwargs, schema = kwargs or {}, func._schema  # noqa: SLF001 - which has no public name
        if schema.returns and not any(isinstance(each.type, _TENSORS) for each in schema.returns):
            with NamedCall("reading of a sharded tensor"):
                args, kwargs = pytree.tree_map_only(DTensor, whole_of, (args, kwargs))
            return func(*args, **kwargs)
        written = _written(schema, args, kwargs)
        if any(each.is_copy for each in written):
            msg = "the values would be lost: `parameter[0].zero_()`, too, writes to a copy of what other ranks hold."
            raise _unsupported(func, msg)
        if torch.Tag.nondeterministic_seeded in func.tags:
            msg = "each rank would draw the same numbers for its rows, or others than one process does."
            raise _unsupported(func, msg)
        if torch.Tag.inplace_view in func.tags:
            msg = "shards can't follow a change of shape in place."
            raise _unsupported(func, msg)
        plain_args, plain_kwargs = pytree.tree_map_only(ShardedTensor, _as_dtensor, (args, kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except torch.OutOfMemoryError:  # of this rank alone
            raise
        except (NotImplementedError, RuntimeError) as error:
            raise _unsupported(func, str(error).splitlines()[0]) from error
        if schema.is_mutable:
            for each in written:
                each.writes[0] += 1
            return written[0] if schema.returns and len(written) == 1 else result
        base = next((each for each in args if isinstance(each, ShardedTensor)), None)
        is_view = any(each.alias_info is not None for each in schema.returns)
        return pytree.tree_map_only(DTensor, lambda made: _made_from(made, base if is_view else None), result)

    @property
    def data(self) -> Tensor:
        """The same values without autograd; an assignment copies values into the parameter's own memory."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, a `ShardedTensor` as well.

        Raises:
            GradientError: If it is not reduced yet.
        """
        gradient: Tensor | None = GRADIENT.__get__(self)
        if gradient is None and self.unreduced:
            self.on_absent()
        if type(gradient) is DTensor:
            gradient = self.grad = _made_from(gradient, None)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None and self.unreduced:
            self.on_drop()
        GRADIENT.__set__(self, gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        made = nn.Parameter(copied, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = made
        return made

    def register_hook(self, hook: Any) -> Any:
        """Refuse a hook on a parameter's gradient, which torch's FSDP would never call.

        Raises:
            ConfigError: If this is a parameter.
        """
        if isinstance(self, nn.Parameter):
            refuse_hook()
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook on a parameter's gradient, as `register_hook` does.

        Raises:
            ConfigError: Always.
        """
        del hook
        refuse_hook()


def gradient_of(parameter: Tensor) -> Any:
    """Return a parameter's gradient as torch keeps it."""
    return GRADIENT.__get__(parameter)


def drop_reduced_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of parameters as torch keeps them; those that are not reduced yet stay."""
    for parameter in parameters:
        GRADIENT.__set__(parameter, None)


def watch_gradients(parameter: Tensor, function: Any) -> None:
    """Call a function of each gradient that autograd adds to a sharded parameter's, also if that is frozen now."""
    is_trained = parameter.requires_grad
    torch.Tensor.register_hook(parameter.requires_grad_(), function)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)


def sharded_parameter(parameter: DTensor, before: nn.Parameter, writes: list[int]) -> nn.Parameter:
    """Return a parameter over the rows of one that ``fully_shard`` has made.

    Args:
        parameter: torch's parameter.
        before: The user's, whose attributes it gets.
        writes: Counts writes of scripts in its only element, for all parameters of a model.
    """
    made = _over(parameter.detach())
    sharded: Any = nn.Parameter(made, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(before.__dict__)
    sharded.writes, sharded.kind = writes, type(before)
    return cast("nn.Parameter", sharded)


def shown_for(parameter: Any, values: Tensor) -> nn.Parameter:
    """Return what an optimizer is shown in place of a parameter: a plain one with its class and attributes."""
    return taken_for(nn.Parameter(values, requires_grad=parameter.requires_grad), parameter, parameter.kind)


def _over(values: Any) -> ShardedTensor:
    make: Any = ShardedTensor
    made: ShardedTensor = make(values._local_tensor, values._spec, requires_grad=False)  # noqa: SLF001 - as `DTensor` itself
    made.is_copy, made.writes = False, [0]
    return made


def _as_dtensor(tensor: ShardedTensor) -> DTensor:
    make: Any = DTensor
    values_of(tensor._local_tensor, "an operation on a sharded tensor")  # noqa: SLF001 - raises while it is offloaded
    made: DTensor = make(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)  # noqa: SLF001 - as above
    return made


def _made_from(made: Any, base: ShardedTensor | None) -> ShardedTensor:
    """Return what an operation has made; ``base`` is what it is a view of, or ``None``."""
    result = _over(made)
    if base is not None:
        memory, of_base = (each._local_tensor.untyped_storage().data_ptr() for each in (made, base))  # noqa: SLF001 - as above
        result.is_copy, result.writes = base.is_copy or memory != of_base, base.writes
    return result


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """Return the tensors that an operation writes to."""
    if not schema.is_mutable:
        return []
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
    leaves = pytree.tree_leaves([given[name] for name in names if name in given])
    return [each for each in leaves if isinstance(each, ShardedTensor)]


def whole_of(tensor: DTensor) -> Tensor:
    """Return a DTensor's whole values, on the device of its rows."""
    sharded: Any = _as_dtensor(tensor) if isinstance(tensor, ShardedTensor) else tensor
    sharded = sharded.detach()
    # The process group has no backend for offloaded rows.
    whole: Tensor = sharded.to(tensor.device_mesh.device_type).full_tensor()
    return whole.to(sharded._local_tensor.device)  # noqa: SLF001 - as above


def _unsupported(func: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{func} can't run on a sharded parameter: {why} Surround it by `with model.whole_parameters():` of the "
        "boosted model, on every rank, with `writes=True` where it changes parameters. In forward, parameters are "
        "whole while their unit runs: for a part of the model that runs outside of it, name a method that calls it in "
        "`TorchFSDPPlugin(forward_methods=[...])`, or choose units without it by `unit_classes`, as what belongs to "
        "no unit is gathered for the whole forward. What replaces parameters, as `resize_token_embeddings`, "
        "comes before `boost`."
    )


def refuse_hook() -> NoReturn:
    """Raise for a hook on a parameter's gradient.

    Raises:
        ConfigError: Always.
    """
    msg = (
        "A hook on the gradient of a sharded parameter would never run: FSDP computes with gathered copies. Change "
        "gradients after `backward`, by `parameter.grad` or `booster_runtime.set_full_gradient`, or use plugin='zero'."
    )
    raise ConfigError(msg)
