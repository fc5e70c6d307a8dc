"""Collectives of `torch.distributed` in a planned run: counted, and answered as if every rank did what this one does.

`call_collective` gets the operations that torch dispatches, those of its C++ code included, such as DDP's reductions.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_runtime.planning.answers import ANSWERED_NUMEL, repeat_into, times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from booster_runtime.planning.ledger import Ledger


class _Done(Work):
    """A collective that is complete, as torch's C++ code asks for it.

    Args:
        tensors: The result.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors: Sequence[Tensor] = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        del timeout
        self._tensors = ()
        return True

    def get_future(self) -> Any:
        """Return a future that has the result."""
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        self._tensors = ()
        return future


_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "recv": "receive",
    "broadcast": "broadcast",
    "send": "send",
}
"""Kinds of collectives by a part of the operation's name."""
_recent: deque[_Done] = deque(maxlen=64)
"""Torch's C++ code keeps the operation, but not the Python object that implements it."""


def call_collective(func: Any, args: Any, kwargs: Any, ledger: Ledger | None, *, computes: bool) -> Any:
    """Count an operation of ``c10d``, and run it or leave it out.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        ledger: Where it is counted; ``None`` where it is part of something that is counted.
        computes: Whether to run it.

    Raises:
        ConfigError: If it receives a message that no rank sends.

    Collective: every rank of the group, if it is run; else none.
    """
    name = func._schema.name.removeprefix("c10d::")  # noqa: SLF001 - the operation's name
    if name in ("barrier", "monitored_barrier_", "check_for_nan"):
        return func(*args, **kwargs)
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = dist.ProcessGroup.unbox(given["process_group"])
    size, rank = group.size(), group.rank()
    if ledger is not None and size > 1:
        kind, payload, wire = _size_of(name, given, size, rank)
        ledger.communicate(kind, payload, wire)
    if computes:
        return func(*args, **kwargs)
    if name in ("recv_", "recv_any_source_"):
        msg = (
            "Stages of a pipeline receive tensors whose shapes only another rank knows, so that settings with a "
            "pipeline can't be planned. Plan without `pp_size`."
        )
        raise ConfigError(msg)
    outputs = args[0]
    _answer(name, given, size, rank)
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    done = _Done(tensors)
    _recent.append(done)
    boxed = done.boxed()
    return (outputs, boxed) if len(func._schema.returns) == 2 else boxed  # noqa: SLF001


def wire_of_all_reduce(num_bytes: int, size: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce.

    Reference: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * num_bytes * (size - 1) // size


def _bytes(tensors: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor))


def _size_of(name: str, given: dict[str, Any], size: int, rank: int) -> tuple[str, int, int]:
    """Return kind, payload and bytes sent of an operation."""
    kind = next((kind for part, kind in _KINDS.items() if part in name), name.strip("_"))
    source = next((given[key] for key in given if key.startswith("input")), next(iter(given.values())))
    payload = _bytes(next(iter(given.values())) if kind == "all_gather" else source)
    if kind == "all_reduce":
        sent = wire_of_all_reduce(payload, size)
    elif kind in ("all_gather", "reduce_scatter"):
        sent = payload * (size - 1) // size
    elif kind == "all_to_all":
        sent = payload - _own_of_all_to_all(name, given, payload, size, rank)
    else:
        sent = 0 if kind == "receive" else payload
    return kind, payload, sent


def _own_of_all_to_all(name: str, given: dict[str, Any], payload: int, size: int, rank: int) -> int:
    """Return the bytes that an all-to-all leaves on this rank."""
    if name == "alltoall_":
        return _bytes(given["input_tensors"][rank])
    source, splits = given["input"], given["input_split_sizes"]
    rows = source.shape[0] if source.dim() else 0
    return int(payload * splits[rank] // rows) if splits and rows else payload // size


def _answer(name: str, given: dict[str, Any], size: int, rank: int) -> None:
    """Write the result of an operation on small tensors, as if every rank had passed what this one did."""
    leaves = [leaf for leaf in pytree.tree_leaves(list(given.values())[:2]) if isinstance(leaf, Tensor)]
    if any(leaf.numel() > ANSWERED_NUMEL for leaf in leaves):
        return
    answers: dict[str, Callable[[], object]] = {
        "allreduce_": lambda: [times(tensor, given["reduce_op"].op(), size) for tensor in given["tensors"]],
        "allreduce_coalesced_": lambda: [times(tensor, given["reduce_op"].op(), size) for tensor in given["tensors"]],
        "allgather_": lambda: [
            out.copy_(source)
            for outs, source in zip(given["output_tensors"], given["input_tensors"], strict=True)
            for out in outs
        ],
        "_allgather_base_": lambda: repeat_into(given["output_tensor"], given["input_tensor"]),
        "_reduce_scatter_base_": lambda: times(
            given["output_tensor"].copy_(given["input_tensor"].chunk(size)[rank]), given["reduce_op"].op(), size
        ),
        "alltoall_": lambda: [out.copy_(given["input_tensors"][rank]) for out in given["output_tensors"]],
        "alltoall_base_": lambda: repeat_into(
            given["output"],
            given["input"].chunk(size)[rank]
            if not given["input_split_sizes"]
            else given["input"].split(given["input_split_sizes"])[rank],
        ),
    }
    if name in answers:
        answers[name]()
