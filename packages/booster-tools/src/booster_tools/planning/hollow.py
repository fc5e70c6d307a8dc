"""`Watching`: a dispatch mode that counts what a run does, and can leave out the computation.

Without computation, tensors are ordinary ones of the CPU, with addresses, views and storages as always. The memory of
large ones is reserved by the operating system and never touched, so that it takes no room. An operation on large
tensors returns memory of the shape that torch's own meta kernels tell, and writes nothing into it. Operations on small
tensors run: flags, counts, sizes and token ids have their values. What is small and comes from large tensors is zero.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from booster_tools.planning.answers import SMALL_NUMEL
from booster_tools.planning.messages import call_collective, call_functional
from booster_tools.planning.shapes import Shapes, replace_tensors, tensors_in, unplanned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_tools.planning.ledger import Ledger
    from booster_tools.planning.mail import Mailbox

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
_LEFT = object()


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory, collectives and floating point operations of what runs inside.

    Args:
        ledger: Where they are counted.
        mailbox: What this rank sends to others, and gets from them; ``None`` lets it communicate as in training.
        computes: Whether all is run, as in training, or only what is small.
    """

    def __init__(self, ledger: Ledger, mailbox: Mailbox | None = None, *, computes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._mailbox = ledger, mailbox
        self._computes = computes
        self._is_quiet = False
        self._makes_unknown = False
        self._kinds: dict[Any, _Kind] = {}
        self._shapes = Shapes()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Don't count collectives inside: they are part of one that is counted as a whole."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or find out what it would return, and count it."""
        kwargs = kwargs or {}
        if types:  # of tensors that dispatch themselves
            if any(issubclass(each, FakeTensor) for each in types):
                return func(*args, **kwargs)  # torch's DTensor asks them for shapes
            if any(
                issubclass(each, Tensor) and each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types
            ):
                return NotImplemented  # a wrapper, whose operations on the tensors inside come here in turn
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _Kind(func)
        if kind.is_collective or kind.is_functional_collective:
            answer = self._communicate(func, kind, args, kwargs)
            if answer is not _LEFT:
                return answer
        self._makes_unknown = False
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs.values())
        is_meta = any(leaf.is_meta for leaf in given)
        out = self._call(func, kind, args, kwargs, given, is_meta=is_meta)
        if kind.flops is not None and not is_meta:
            self._ledger.flops += int(kind.flops(*args, **kwargs, out_val=out))
        self._note(out)
        return out

    def _note(self, out: Any) -> None:
        """Count the memory of an operation's results."""
        for leaf in (out,) if isinstance(out, Tensor) else tensors_in((out,)):
            if not leaf.is_meta and leaf.layout is torch.strided:
                self._ledger.note(leaf, is_unknown=self._makes_unknown)

    def _communicate(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """Count a collective, and return what it returns; `_LEFT` where it is run like other operations."""
        is_counted = not self._is_quiet
        if kind.is_collective:
            return call_collective(func, args, kwargs, self._ledger, is_counted=is_counted, mailbox=self._mailbox)
        answers = self._mailbox is not None
        answer = call_functional(func, args, kwargs, self._ledger, is_counted=is_counted, answers=answers)
        if answer is None:
            return _LEFT
        self._makes_unknown = False
        if func not in _WAITS:
            self._note(answer)
        return answer

    def _call(self, func: Any, kind: _Kind, args: Any, kwargs: Any, leaves: list[Tensor], *, is_meta: bool) -> Any:
        if self._computes or kind.computes_nothing or is_meta or (kwargs and str(kwargs.get("device")) == "meta"):
            return self._read(leaves[0]) if func is _NUMBER else func(*args, **kwargs)
        is_small = max([leaf.numel() for leaf in leaves], default=0) <= SMALL_NUMEL
        unknown = [leaf for leaf in leaves if self._ledger.is_unknown(leaf)]
        if is_small and any(_is_part_of_large(leaf) for leaf in unknown):
            is_small = False
            if kind.only_writes:
                _clear_small(kind.written_to(args, kwargs))
        self._makes_unknown = bool(unknown) or not is_small
        if kind.depends_on_values and any(kind.reads(leaf) for leaf in unknown):
            raise unplanned(func, "its argument has no values in a plan")
        if is_small and kind.needs_arguments_only:
            return func(*args, **kwargs)
        if kind.is_question:
            return True  # whether two tensors are equal
        if kind.only_writes:
            return kind.written(args, kwargs)
        shapes = self._shapes.returned(func, args, kwargs)
        if is_small and max([leaf.numel() for leaf in tensors_in((shapes,))], default=0) <= SMALL_NUMEL:
            return func(*args, **kwargs)
        self._makes_unknown = True
        return kind.with_written(replace_tensors(shapes, _memory_like), args, kwargs)

    def _read(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element."""
        is_known = self._computes or not (self._ledger.is_unknown(tensor) and _is_part_of_large(tensor))
        return _NUMBER(tensor) if is_known else torch.zeros((), dtype=tensor.dtype).item()


class _Kind:
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
        self.flops = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as torch's counter looks it up
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
