"""Communication by `torch.distributed` in a planned run: counted, and answered.

Collectives are answered as if every rank did what this one does; what a message would bring is unknown.
`call_collective` gets the operations that torch dispatches, those of its C++ code included, such as DDP's
reductions; `call_functional` those of DTensor.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]  # no public way
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_tools.planning.meta_executor import SMALL_NUMEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from booster_tools.planning.recorder import StepRecorder

_ANSWERED_NUMEL = 1 << 16
"""Larger results get no values: nothing that a plan reads is so large."""
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "recv": "receive",
    "broadcast": "broadcast",
    "send": "send",
}
"""Kinds of collectives by a part of the operation's name without underscores."""


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


_recent: deque[_Done] = deque(maxlen=64)
"""Torch's C++ code keeps the operation, but not the Python object that implements it."""


def call_collective(func: Any, args: Any, kwargs: Any, recorder: StepRecorder) -> Any:
    """Count an operation of ``c10d``, and run it, or answer it in a plan.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        recorder: Where it is counted.

    Raises:
        ConfigError: If it receives from any rank.

    Collective: every rank of the group, if it is run; else none.
    """
    schema = func._schema  # noqa: SLF001 - as torch's own modes read it
    name = schema.name.removeprefix("c10d::")
    if name in ("barrier", "monitored_barrier_", "check_for_nan"):
        return func(*args, **kwargs)
    given = _by_name(func, args, kwargs)
    group = dist.ProcessGroup.unbox(given["process_group"])
    size, rank = group.size(), group.rank()
    kind = _kind_of(name)
    if size > 1:
        recorder.communicate(kind, *_bytes_of(kind, name, given, size, rank))
    if not recorder.is_alone:
        return func(*args, **kwargs)
    if name == "recv_any_source_":
        msg = "A rank receives from whichever rank sends first, so that what it receives can't be planned."
        raise ConfigError(msg)
    outputs = args[0]
    if kind == "receive":
        _receive(outputs, recorder)
    if kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") and name != "allgather_coalesced_":
        _answer(name, kind, given, size, rank)
    done = _Done(_tensors(outputs))
    _recent.append(done)
    boxed = done.boxed()
    return (outputs, boxed) if len(schema.returns) == 2 else boxed


def call_functional(func: Any, args: Any, kwargs: Any, recorder: StepRecorder) -> Tensor | list[Tensor] | None:
    """Count an operation of ``_c10d_functional``, which returns its result, as DTensor's collectives do.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        recorder: Where it is counted.

    Returns:
        The answer, in a plan and if it is small; ``None`` leaves the operation to the caller.

    Raises:
        ConfigError: If it is a message to one rank, which is not planned in this form.

    Collective: none.
    """
    name = func._schema.name.split("::")[1]  # noqa: SLF001 - the operation's name
    is_planned = recorder.is_alone
    if name == "wait_tensor":
        waited: Tensor = args[0]
        return waited if is_planned else None
    if name in ("isend", "irecv", "batch_p2p_ops"):
        msg = f"`{func}` is a message in torch's functional form, which plans don't follow. Use `torch.distributed`'s."
        raise ConfigError(msg)
    given = _by_name(func, args, kwargs)
    group = _group_of(given["group_name"])
    size, rank = group.size(), group.rank()
    source = next(iter(given.values()))
    inputs, kind = _tensors(source), _kind_of(name)
    grows = size if kind == "all_gather" else 1
    splits = given.get("input_split_sizes")
    if size > 1:
        payload = _bytes(inputs) * grows
        own = _bytes(torch.split(inputs[0], splits)[rank]) if splits else payload // size
        recorder.communicate(kind, payload, _sent(kind, payload, own, size))
    if not is_planned or any(leaf.numel() * grows > _ANSWERED_NUMEL or recorder.is_unknown(leaf) for leaf in inputs):
        return None
    made = []
    for leaf in inputs:
        if name == "shard_dim_alltoall":
            out = torch.cat([leaf.chunk(size, given["shard_dim"])[rank]] * size, given["gather_dim"])
        else:
            out = _received(kind, leaf, size, rank, splits)
        target = leaf if name.endswith("_") else given.get("out")  # in place, or into memory of the caller's
        out = out.clone() if target is None else target.copy_(out)
        made.append(out.mul_(size) if given.get("reduce_op") == "sum" else out)
    return made if isinstance(source, (list, tuple)) else made[0]


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return an operation's arguments by name."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - as torch's own modes read it
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _kind_of(name: str) -> str:
    plain = name.replace("_", "")
    return next((kind for part, kind in _KINDS.items() if part in plain), name.strip("_"))


def _group_of(name: Any) -> ProcessGroup:
    """Return the group of a functional collective, which newer versions of torch pass itself."""
    return name if isinstance(name, dist.ProcessGroup) else _resolve_process_group(name)


def _receive(tensors: Sequence[Tensor], recorder: StepRecorder) -> None:
    """Let messages have come: zeros where values are computed, and small ones."""
    for tensor in tensors:
        if recorder.computes or tensor.numel() <= SMALL_NUMEL:
            tensor.zero_()
        if not recorder.computes:
            recorder.mark_unknown(tensor)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in _tensors(tensors))


def _sent(kind: str, payload: int, own: int, size: int) -> int:
    """Return the bytes that one rank sends by a bandwidth-optimal algorithm, such as a ring all-reduce.

    Args:
        kind: Of collective.
        payload: Size of the whole buffer.
        own: What of it stays on this rank.
        size: Number of ranks.

    Reference: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    if kind == "all_reduce":
        return 2 * payload * (size - 1) // size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return payload - own
    return 0 if kind == "receive" else payload


def _bytes_of(kind: str, name: str, given: dict[str, Any], size: int, rank: int) -> tuple[int, int]:
    """Return payload and bytes sent of an operation."""
    source = next((given[key] for key in given if key.startswith("input")), next(iter(given.values())))
    payload = _bytes(next(iter(given.values())) if kind == "all_gather" else source)
    own = payload // size
    if name == "alltoall_":
        own = _bytes(source[rank])
    elif given.get("input_split_sizes"):
        own = _bytes(source.split(given["input_split_sizes"])[rank])
    return payload, _sent(kind, payload, own, size)


def _answer(name: str, kind: str, given: dict[str, Any], size: int, rank: int) -> None:
    """Write the results of an operation that are small, as if every rank had passed what this one did."""
    outputs, inputs = list(given.values())[:2]
    if kind == "all_reduce":
        inputs = outputs
    if name == "allgather_":
        pairs = [(out, source) for outs, source in zip(outputs, inputs, strict=True) for out in outs]
    elif name == "reduce_scatter_":
        pairs = [(out, sources[rank]) for out, sources in zip(outputs, inputs, strict=True)]
    elif name == "alltoall_":
        pairs = [(out, inputs[rank]) for out in outputs]
    else:
        pairs = list(zip(_tensors(outputs), _tensors(inputs), strict=True))
    is_of_parts = name not in ("allgather_", "reduce_scatter_", "alltoall_")
    is_sum = "reduce_op" in given and given["reduce_op"].op() == dist.ReduceOp.SUM
    for out, source in pairs:
        if out.numel() <= _ANSWERED_NUMEL:
            found = _received(kind, source, size, rank, given.get("input_split_sizes")) if is_of_parts else source
            if found.numel() == out.numel():
                out.copy_(found.reshape(out.shape))
            if is_sum:
                out.mul_(size)


def _received(kind: str, source: Tensor, size: int, rank: int, splits: list[int] | None) -> Tensor:
    """Return what a rank gets for a whole buffer, but for the factor of a sum, if all ranks pass the same."""
    if kind == "all_gather":
        return torch.cat([source.reshape(-1) if source.dim() == 0 else source] * size)
    if kind in ("reduce_scatter", "all_to_all"):
        length = source.shape[0] // size
        own = torch.split(source, splits)[rank] if splits else source[rank * length : (rank + 1) * length]
        return own if kind == "reduce_scatter" else torch.cat([own] * size)
    return source
