"""What an operation returns that a plan does not compute.

Tensors of a plan are ordinary ones of the CPU, with addresses, views and storages as always. The memory of large ones
is reserved by the operating system and never touched, so that it takes no room. An operation on large tensors returns
memory of the shape that torch's own meta kernels tell, and writes nothing into it. Operations on small tensors run:
flags, counts, sizes and token ids have their values. What is small and comes from large tensors is zero.

A plan of a pipeline passes millions of operations, so that arguments are walked through by hand here: they are tensors,
numbers and lists of these, and torch's general trees take several times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_tools.flops import GROUPED_PRODUCTS, formula_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SMALL_NUMEL = 1 << 14
"""Operations run where neither their arguments nor their results have more elements."""
_aten = torch.ops.aten
_NUMBER = _aten._local_scalar_dense.default  # noqa: SLF001 - the name of an operation
_AS_THEY_ARE = {
    _NUMBER,
    _aten._unsafe_view.default,  # noqa: SLF001 - the name of an operation
    _aten.resize_.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.source_Tensor,
    _aten.set_.source_Tensor_storage_offset,
    _aten.set_.default,
    _aten.as_strided_.default,
    _aten.squeeze_.default,
    _aten.squeeze_.dim,
    _aten.unsqueeze_.default,
    _aten.t_.default,
    _aten.transpose_.default,
    _aten.detach_.default,
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.is_pinned.default,
}
"""Operations that compute nothing."""
_WAITS = {torch.ops._c10d_functional.wait_tensor.default}  # noqa: SLF001 - the name of an operation


class Operation:
    """What is known of an operation from its schema.

    Attributes:
        depends_on_values: The shape of its result does.
        computes_nothing: It only makes views, reserves memory or changes shapes; or it returns no tensors.
        only_writes: It writes into arguments, and returns nothing else.
        is_question: It compares whole tensors.
        is_collective: It communicates.
        is_functional_collective: It communicates, and returns the result in new memory.
        flops: Counts its floating point operations; ``None`` where it has none worth counting.
        needs_arguments_only: Small arguments mean a small result, or one whose shape depends on their values.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema  # noqa: SLF001 - torch's own modes read it
        self.is_collective = func.namespace == "c10d"
        self.flops = formula_of(func._overloadpacket)  # noqa: SLF001 - as torch's counter looks it up
        returns = schema.returns
        self._names = [argument.name for argument in schema.arguments]
        is_functional = func.namespace in ("_c10d_functional", "_dtensor")
        self.is_functional_collective = is_functional and ("group_name" in self._names or func in _WAITS)
        self._written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._aliases: list[str | None] = []
        for each in returns:
            found = None
            if each.alias_info is not None and each.alias_info.is_write:
                found = next(
                    (
                        argument.name
                        for argument in schema.arguments
                        if argument.alias_info is not None
                        and argument.alias_info.before_set == each.alias_info.before_set
                    ),
                    None,
                )
            self._aliases.append(found)
        is_view = bool(returns) and all(
            each.alias_info is not None and not each.alias_info.is_write for each in returns
        )
        makes_tensors = any("Tensor" in str(each.type) for each in returns)
        self.is_question = func is _aten.equal.default
        self.computes_nothing = (
            is_view or func in _AS_THEY_ARE or not (makes_tensors or self._written or self.is_question)
        )
        self.only_writes = bool(self._written) and all(self._aliases)
        self.depends_on_values = torch.Tag.dynamic_output_shape in func.tags
        self.needs_arguments_only = self.only_writes or self.is_question or self.depends_on_values
        self._is_index = func in (_aten.index.Tensor, _aten.index_put_.default)

    def reads(self, tensor: Tensor) -> bool:
        """Return whether the shape of a result that depends on values depends on those of a tensor."""
        return tensor.dtype in (torch.bool, torch.uint8) if self._is_index else True

    def written(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments that an operation returns after writing into them."""
        values = [self._argument(name, args, kwargs) for name in self._aliases]
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def written_to(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that an operation writes into."""
        return tensors_in(self._argument(name, args, kwargs) for name in self._written)

    def with_written(self, made: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation returns, with the arguments that are among it."""
        if not any(self._aliases):
            return made
        values = [
            each if name is None else self._argument(name, args, kwargs)
            for name, each in zip(self._aliases, made, strict=True)
        ]
        return tuple(values)

    def _argument(self, name: str | None, args: Any, kwargs: Any) -> Any:
        assert name is not None, "the operation returns arguments only"
        index = self._names.index(name)
        return args[index] if index < len(args) else kwargs.get(name)


class MetaExecutor:
    """Tells what operations return, and computes those on small tensors only.

    Args:
        is_unknown: Returns whether a tensor's values were not computed.
    """

    def __init__(self, is_unknown: Callable[[Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._shapes: dict[Any, Any] = {}

    def result(self, func: Any, operation: Operation, args: Any, kwargs: Any, given: list[Tensor]) -> tuple[Any, bool]:
        """Return what an operation on tensors that are `given` returns, and whether its values are unknown.

        Raises:
            ConfigError: If the shape of the result depends on values that are unknown, or torch has no meta kernel.
        """
        if operation.computes_nothing:
            return self._read(given[0]) if func is _NUMBER else func(*args, **kwargs), False
        is_small = max([leaf.numel() for leaf in given], default=0) <= SMALL_NUMEL
        unknown = [leaf for leaf in given if self._is_unknown(leaf)]
        if is_small and any(_is_part_of_large(leaf) for leaf in unknown):
            is_small = False
            if operation.only_writes:
                _clear_small(operation.written_to(args, kwargs))
        is_unknown = bool(unknown) or not is_small
        if operation.depends_on_values and any(operation.reads(leaf) for leaf in unknown):
            raise _unplanned(func, "its argument has no values in a plan")
        if is_small and operation.needs_arguments_only:
            return func(*args, **kwargs), is_unknown
        if operation.is_question:
            return True, is_unknown  # whether two tensors are equal
        if operation.only_writes:
            return operation.written(args, kwargs), is_unknown
        shapes = self._shapes_of(func, args, kwargs)
        if is_small and max([leaf.numel() for leaf in tensors_in((shapes,))], default=0) <= SMALL_NUMEL:
            return func(*args, **kwargs), is_unknown
        return operation.with_written(_replace_tensors(shapes, _memory_like), args, kwargs), True

    def _read(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element."""
        is_zero = self._is_unknown(tensor) and _is_part_of_large(tensor)
        return torch.zeros((), dtype=tensor.dtype).item() if is_zero else _NUMBER(tensor)

    def _shapes_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation as tensors of the meta device; layers that are alike ask many times."""
        first: dict[int, int] = {}
        key = (func, _key_of(args, first), _key_of(tuple(kwargs.items()), first) if kwargs else ())
        try:
            found = self._shapes.get(key)
        except TypeError:  # an argument that has no hash
            return _by_meta_kernel(func, args, kwargs)
        if found is None:
            found = self._shapes[key] = _by_meta_kernel(func, args, kwargs)
        return found


def _memory_like(meta: Tensor) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    return made.zero_() if made.numel() <= SMALL_NUMEL else made


def _clear_small(written: list[Tensor]) -> None:
    """Set those of an operation's results to zero that have values: they would be leftovers in memory."""
    for leaf in written:
        if not _is_part_of_large(leaf):
            leaf.zero_()


def _is_part_of_large(tensor: Tensor) -> bool:
    """Whether a tensor shows some elements of a large storage, whose memory was never written to."""
    return tensor.untyped_storage().nbytes() > SMALL_NUMEL * tensor.element_size()


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of an operation's arguments or results, those in lists included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def _replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return a result with something else in the place of each of its tensors."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)):
        made = [_replace_tensors(each, replace) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def _unplanned(func: Any, reason: str) -> ConfigError:
    """Return the error of an operation whose result can't be planned."""
    return ConfigError(
        f"The shape of what `{func}` returns can't be known without computing it ({reason}), so that this model can't "
        "be planned. Plan with a variant of it that has no such operation: experts of transformers have one by "
        '`model.set_experts_implementation("grouped_mm")`.'
    )


def _key_of(values: Iterable[Any], first: dict[int, int]) -> tuple[Any, ...]:
    """Return what a result's shape depends on; tensors that are the same one have the same number."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key.append((first.setdefault(id(value), len(first)), value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            key.append(_key_of(value, first))
        else:
            key.append((type(value), value))
    return tuple(key)


def _by_meta_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    metas: dict[int, Tensor] = {}

    # Its meta kernel takes what a device's does, bf16 only; torch's of the CPU takes other formats.
    is_grouped = func._overloadpacket is GROUPED_PRODUCTS  # noqa: SLF001

    def meta_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in metas:
            dtype = torch.bfloat16 if is_grouped and tensor.is_floating_point() else tensor.dtype
            metas[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        return metas[id(tensor)]

    meta_args, meta_kwargs = pytree.tree_map_only(Tensor, meta_of, (args, kwargs))
    meta_kwargs = {key: None if isinstance(value, torch.Generator) else value for key, value in meta_kwargs.items()}
    if "device" in meta_kwargs or not metas:
        meta_kwargs["device"] = torch.device("meta")
    try:
        found = func(*meta_args, **meta_kwargs)
        return found.to(args[0].dtype) if is_grouped and kwargs.get("out_dtype") is None else found
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise _unplanned(func, f"{type(error).__name__}: {first_line}") from error
