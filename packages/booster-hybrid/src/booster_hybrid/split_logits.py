"""`SplitLogits`: logits of which each rank has a part, and nobody the whole.

They look whole: their shape is that of all logits. What can be answered from the part that is here is; every other
function is called on the whole, which the ranks put together when the first one asks. So all of them must make that
call. Code that runs on one rank alone, such as a metric printed there, would meet a collective of what the others do
next: ranks meet before they gather, so that this ends in an error that says so. What would change a copy of the whole
in place raises.

They are split by vocabulary (`booster_hybrid.tensor_parallel.vocabulary`), by positions
(`booster_hybrid.sequence_parallel.loss`), or by positions and then by vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError, MissingRanksError
from booster_core.ranks import DistCoordinator, NamedCall
from booster_hybrid.torch_functions import (
    FACTS,
    asks_format,
    changes_in_place,
    is_elementwise,
    name_of,
    outside_of_graphs,
    version_of,
    writes_in_place,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_hybrid.mesh import RankGroup

_MEETING = "gather of split logits"


class LogitsPartition(ABC):
    """How logits are split over ranks.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    @abstractmethod
    def shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of all logits, given that of a part."""

    @abstractmethod
    def gathered(self, local: Tensor) -> Tensor:
        """Return all logits, given the part that is here.

        Collective: the ranks.
        """

    @abstractmethod
    def shown(self) -> str:
        """Return what is here of what, for messages."""

    def answer(self, func: Callable[..., Any], source: SplitLogits, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return what a function of several arguments answers from parts; ``NotImplemented`` where it needs the whole.

        Args:
            func: The function.
            source: The first part among its arguments.
            args: Its arguments.
            named: Its keyword arguments.
        """
        del func, source, args, named
        return NotImplemented


class _Whole(NamedTuple):
    """All logits, put together already.

    Args:
        tensor: All of them.
        version: Their count of changes then.
        state: What they were made from and under: the part's count of changes, and whether gradients were recorded.
    """

    tensor: Tensor
    version: int
    state: tuple[int, bool]


class SplitLogits(Tensor):
    """This rank's part of logits of shape ``(..., vocabulary)``, made by `split_logits`.

    Conversions and products with numbers work on the parts; split by vocabulary, so do cross entropy, ``argmax(-1)``,
    views and indices that leave the vocabulary alone. Every other function is called on the whole logits, as plain
    tensors with gradients, which are put together when the first one asks: all ranks that have parts must call it. What
    would write into them raises. `local` is the part here, `gather` puts the whole together.

    Attributes:
        partition: How they are split.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
    """

    partition: LogitsPartition
    _inner: SplitLogits | None  # the part, if that is split the other way
    _whole: _Whole | None = None

    def local(self) -> Tensor:
        """Return the part that is here as a plain tensor; split by positions, it may be split by vocabulary still."""
        return self.as_subclass(Tensor) if self._inner is None else self._inner

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the whole logits as a plain tensor; with arguments, what `torch.Tensor.gather` picks of them.

        Split by positions and vocabulary, they come split by vocabulary.

        Collective: the ranks that have parts.
        """
        if args or kwargs:
            picked: Tensor = _on_whole(Tensor.gather, self, (self, *args), kwargs)
            return picked
        return _whole_of(self)

    def alike(self, local: Tensor) -> Tensor:
        """Return other logits that are split as these are."""
        return split_logits(local, self.partition)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # the same as torch's
        """Return what is here of what."""
        return f"SplitLogits({self.partition.shown()}, {self.local()!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the whole logits: from the part where that can be, else from the whole."""
        del types
        args, named = tuple(args), dict(kwargs or {})
        found: list[SplitLogits] = [each for each in pytree.tree_leaves((args, named)) if isinstance(each, SplitLogits)]
        source = found[0]
        with DisableTorchFunctionSubclass():
            for each in found:
                _check_unchanged(each)
            answer = _answer(func, source, args, named)
        if answer is not NotImplemented:
            return answer
        if changes_in_place(func, args, named, SplitLogits):
            msg = (
                f"`{name_of(func)}` would write into {source.partition.shown()}, which `parallel_output=True` leaves "
                "split. Write into `logits.gather()`, the whole, or pass `parallel_output=False`."
            )
            raise ConfigError(msg)
        return _on_whole(func, source, args, named)


def split_logits(local: Tensor, partition: LogitsPartition) -> Tensor:
    """Return a part of logits that answers for the whole.

    Args:
        local: The part; it may be split another way itself.
        partition: How they are split.
    """
    with DisableTorchFunctionSubclass():
        logits = local.as_subclass(SplitLogits)
    logits.partition, logits._inner = partition, local if isinstance(local, SplitLogits) else None  # noqa: SLF001 - made here
    return logits


def _answer(func: Callable[..., Any], source: SplitLogits, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return what a function answers on the parts, ``NotImplemented`` where it needs the whole."""
    name = name_of(func)
    if any(isinstance(each, SplitLogits) for each in (*args, *named.values())):
        if name in FACTS or asks_format(func, args, SplitLogits):
            return func(*args, **named)
        if is_elementwise(func, args, named, source):
            return _elementwise(func, source, args, named)
        if name in _SHAPES and args and args[0] is source:
            return _SHAPES[name](_whole_shape(source), *(args[1:] if name == "size" else ()), **named)
        if name == "view_as" and args[0] is source and args[-1] is source:
            return _viewed(source)
    return source.partition.answer(func, source, args, named)


def _viewed(source: SplitLogits) -> Tensor:
    """Return a view of the same logits, as torch takes of what a module with a full backward hook returns."""
    local = source.local()
    return source.alike(_viewed(local) if isinstance(local, SplitLogits) else local.view_as(local))


def _whole_shape(source: SplitLogits) -> torch.Size:
    inner = source._inner  # noqa: SLF001 - our own
    return source.partition.shape(Tensor.size(source) if inner is None else _whole_shape(inner))


def _elementwise(func: Callable[..., Any], source: SplitLogits, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    inner = source._inner  # noqa: SLF001 - our own
    if inner is None:
        return split_logits(func(*args, **named).as_subclass(Tensor), source.partition)
    if writes_in_place(func):
        return NotImplemented
    args, named = pytree.tree_map_only(SplitLogits, SplitLogits.local, (args, named))
    return split_logits(SplitLogits.__torch_function__(func, (), args, named), source.partition)


def _check_unchanged(source: SplitLogits) -> None:
    """Refuse to go on where somebody has changed, in place, what was put together: the parts don't know of it.

    Raises:
        ConfigError: If so.
    """
    whole = source._whole  # noqa: SLF001 - our own
    if whole is not None and version_of(whole.tensor) != whole.version:
        msg = (
            f"A view of all logits, of which this rank has {source.partition.shown()}, was changed in place, which "
            "does not reach their parts. Change `logits.gather()` and go on with that, or pass `parallel_output=False`."
        )
        raise ConfigError(msg)


def _whole_of(source: SplitLogits) -> Tensor:
    """Return the whole logits, which are put together once for all that asks for them.

    Collective: the ranks that have parts.
    """
    local, whole = source.local(), source._whole  # noqa: SLF001 - our own
    state = (version_of(local), torch.is_grad_enabled())
    if whole is None or whole.state != state:
        tensor = source.partition.gathered(local)
        whole = source._whole = _Whole(tensor, version_of(tensor), state)  # noqa: SLF001 - our own
    return whole.tensor


@outside_of_graphs
def _on_whole(func: Callable[..., Any], source: SplitLogits, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function with whole tensors in the place of parts.

    Raises:
        MissingRanksError: If some ranks that have parts do not make the call.

    Collective: these ranks.
    """
    group = source.partition.group.group
    ranks = None if group is None else dist.get_process_group_ranks(group)
    with NamedCall(_MEETING, ranks):
        meet(name_of(func), group)
        args, named = pytree.tree_map_only(SplitLogits, _whole_of, (tuple(args), dict(named)))
    return func(*args, **named)


def meet(name: str, group: ProcessGroup | None) -> None:
    """Wait until all ranks that have parts have called.

    Args:
        name: What was called.
        group: The ranks.

    Raises:
        MissingRanksError: If some do not come.

    Collective: the group.
    """
    try:
        DistCoordinator().block_all(group, name=_MEETING)
    except MissingRanksError as error:
        msg = (
            f"{error} `{name}` needs whole logits, of which each of these ranks has a part. Let all of them call it, "
            "look at `logits.local()` on one, or pass `parallel_output=False`."
        )
        raise MissingRanksError(msg) from error


_SHAPES: dict[str, Callable[..., Any]] = {
    "shape": lambda shape: shape,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    "numel": torch.Size.numel,
    "nelement": torch.Size.numel,
    "__len__": lambda shape: shape[0],
}
