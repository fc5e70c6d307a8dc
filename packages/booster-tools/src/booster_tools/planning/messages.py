"""Communication by `torch.distributed` in a planned run: counted, and answered.

Collectives are answered as if every rank did what this one does, and messages by what their sender has sent in its own
run. `call_collective` gets the operations that torch dispatches, those of its C++ code included, such as DDP's
reductions.
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
from booster_tools.planning.answers import ANSWERED_NUMEL, SMALL_NUMEL, repeat_into, times
from booster_tools.planning.mail import Channel, Message
from booster_tools.planning.timeline import Receive, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from booster_tools.planning.ledger import Ledger
    from booster_tools.planning.mail import Mailbox


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


class _Receipt(_Done):
    """A message on its way, which is there once it is waited for.

    Args:
        tensor: What it is written into.
        take: Returns the message.
        mailbox: Keeps this object until then.
    """

    def __init__(self, tensor: Tensor, take: Callable[[], None], mailbox: Mailbox) -> None:
        super().__init__([tensor])
        self._take: Callable[[], None] | None = take  # which holds the tensor
        self._mailbox = mailbox
        mailbox.waiting.add(self)

    def wait(self, timeout: Any = None) -> bool:
        """Take the message, which must have been sent."""
        take, self._take = self._take, None
        if take is not None:
            self._mailbox.waiting.remove(self)
            take()
        return super().wait(timeout)


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


def call_collective(
    func: Any, args: Any, kwargs: Any, ledger: Ledger, *, is_counted: bool, mailbox: Mailbox | None
) -> Any:
    """Count an operation of ``c10d``, and run it or leave it out.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        ledger: Where it is counted.
        is_counted: Whether it is; not where it is part of something that is counted.
        mailbox: What answers messages; ``None`` runs the operation.

    Raises:
        ConfigError: If it receives from any rank, or something else than was sent.

    Collective: every rank of the group, if it is run; else none.
    """
    name = func._schema.name.removeprefix("c10d::")  # noqa: SLF001 - the operation's name
    if name in ("barrier", "monitored_barrier_", "check_for_nan"):
        return func(*args, **kwargs)
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = dist.ProcessGroup.unbox(given["process_group"])
    size, rank = group.size(), group.rank()
    if is_counted and size > 1:
        kind, payload, wire = _size_of(name, given, size, rank)
        ledger.communicate(kind, payload, wire)
    if mailbox is None:
        return func(*args, **kwargs)
    if name in ("send", "recv_"):
        done = _exchange(name, given, group, ledger, mailbox)
        _recent.append(done)
        return done.boxed()
    if name == "recv_any_source_":
        msg = "A rank receives from whichever rank sends first, so that what it receives can't be planned."
        raise ConfigError(msg)
    outputs = args[0]
    _answer(name, given, size, rank)
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    done = _Done(tensors)
    _recent.append(done)
    boxed = done.boxed()
    return (outputs, boxed) if len(func._schema.returns) == 2 else boxed  # noqa: SLF001


def call_functional(
    func: Any, args: Any, kwargs: Any, ledger: Ledger, *, is_counted: bool, answers: bool
) -> Tensor | list[Tensor] | None:
    """Count an operation of ``_c10d_functional``, which returns its result, as DTensor's collectives do.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
        ledger: Where it is counted.
        is_counted: Whether it is.
        answers: Whether to answer it where its result is small.

    Returns:
        The answer; ``None`` leaves the operation to the caller.

    Raises:
        ConfigError: If it is a message to one rank, which is not planned in this form.

    Collective: none.
    """
    name = func._schema.name.split("::")[1]  # noqa: SLF001 - the operation's name
    if name == "wait_tensor":
        waited: Tensor = args[0]
        return waited if answers else None
    if name in ("isend", "irecv", "batch_p2p_ops"):
        msg = f"`{func}` is a message in torch's functional form, which plans don't follow. Use `torch.distributed`'s."
        raise ConfigError(msg)
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group_of(given["group_name"])
    size, rank = group.size(), group.rank()
    inputs = [leaf for leaf in pytree.tree_leaves(next(iter(given.values()))) if isinstance(leaf, Tensor)]
    kind = next(kind for kind in _FUNCTIONAL if kind in name.replace("alltoall", "all_to_all"))
    grows = size if kind == "all_gather" else 1
    if is_counted and size > 1:
        payload = _bytes(inputs) * grows
        own = payload // size
        if given.get("input_split_sizes") and inputs[0].numel():
            own = payload * given["input_split_sizes"][rank] // inputs[0].shape[0]
        sent = {"all_reduce": wire_of_all_reduce(payload, size), "broadcast": payload}.get(kind, payload - own)
        ledger.communicate(kind, payload, sent)
    if not answers or any(leaf.numel() * grows > ANSWERED_NUMEL or ledger.is_unknown(leaf) for leaf in inputs):
        return None
    made = [_functional_answer(name, kind, leaf, given, size, rank) for leaf in inputs]
    return made if isinstance(next(iter(given.values())), (list, tuple)) else made[0]


def _functional_answer(name: str, kind: str, source: Tensor, given: dict[str, Any], size: int, rank: int) -> Tensor:
    """Return what a rank gets of an operation on a small tensor, as if every rank had passed what this one did."""
    if name in ("all_reduce_", "all_reduce_coalesced_", "broadcast_"):
        out = source  # in place
    elif name == "shard_dim_alltoall":
        out = torch.cat([source.chunk(size, given["shard_dim"])[rank]] * size, given["gather_dim"])
    elif kind == "all_gather":
        out = torch.cat([source] * size)
    elif kind == "reduce_scatter":
        out = source.chunk(size)[rank].clone()
    elif kind == "all_to_all":
        out = torch.cat([torch.split(source, given["input_split_sizes"])[rank]] * size)
    else:
        out = source.clone()
    if given.get("reduce_op") == "sum":
        out.mul_(size)
    return given["out"].copy_(out) if "out" in given else out


_FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def _group_of(name: Any) -> ProcessGroup:
    """Return the group of a functional collective, which newer versions of torch pass itself."""
    return name if isinstance(name, dist.ProcessGroup) else _resolve_process_group(name)


def _exchange(name: str, given: dict[str, Any], group: ProcessGroup, ledger: Ledger, mailbox: Mailbox) -> _Done:
    """Send a message, or expect one."""
    (tensor,) = given["tensors"]
    ranks, tag = tuple(dist.get_process_group_ranks(group)), given["tag"]
    if name == "send":
        channel = Channel(ranks, mailbox.rank, ranks[given["dst"]], tag)
        is_known = tensor.numel() <= SMALL_NUMEL and not ledger.is_unknown(tensor)
        message = Message(tensor.shape, tensor.dtype, tensor.clone() if is_known else None)
        ledger.exchange(Send(channel, mailbox.send(channel, message), _bytes(tensor)))
        return _Done([tensor])
    channel = Channel(ranks, ranks[given["src"]], mailbox.rank, tag)
    index = mailbox.expect(channel)

    def take() -> None:
        message = mailbox.receive(channel, index)
        if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
            msg = (
                f"Rank {channel.receiver} waits for {tensor.dtype} of shape {tuple(tensor.shape)} from rank "
                f"{channel.sender}, which sends {message.dtype} of shape {tuple(message.shape)}."
            )
            raise ConfigError(msg)
        ledger.exchange(Receive(channel, index))
        if message.values is None:
            ledger.mark_unknown(tensor)
        else:
            tensor.copy_(message.values)

    return _Receipt(tensor, take, mailbox)


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
