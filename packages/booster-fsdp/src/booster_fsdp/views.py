r"""Plain tensors on which the user's optimizer steps, in place of the DTensors of a sharded model.

From the first step on, groups and state hold plain tensors with the memory of the shards: torch dispatches each
operation on a DTensor, some optimizers (Rprop) use operations that it does not support, and fused kernels take no
mixture of both kinds. Whoever asks the boosted optimizer for its groups or state, as torch's own tools do, gets the
model's parameters and DTensors.

For optimizers that need whole parameters (Adafactor, Muon), each sharded parameter has an owner among the ranks of its
replica, which also keeps its state::

    rank 0  rows 0-1 --\\                   /--> rows 0-1
    rank 1  rows 2-3 ---> whole on owner: step --> rows 2-3
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from booster_fsdp.parameters import GRADIENT, shown_for
from booster_runtime.sharding import dtensor_of, is_cut, local_of, sharded_like, step_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_runtime.sharding import ShardingRanks


class Views:
    """Shows the user's optimizer plain tensors in place of the model's parameters.

    Args:
        optimizer: The user's optimizer.

    Attributes:
        of: The tensor that is shown for each parameter; others are not shown. A replicated one is shown itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.of: dict[Any, nn.Parameter] = {}
        self._rows: dict[Any, Any] = {}  # the views of rows
        self._memory: dict[Any, Tensor] = {}  # whose memory these have
        self._lists: list[dict[str, Any]] | None = None  # of each group, without the views
        self._known: dict[int, DTensor] = {}  # those from before, by the ids of their local values

    def add_rows(self, parameter: nn.Parameter) -> None:
        """Show this rank's rows of a parameter, and bring its rows of the state that there is to their device."""
        if not isinstance(parameter, DTensor):
            self.of[parameter] = parameter
            return
        rows = local_of(parameter)
        self.of[parameter] = self._rows[parameter] = shown_for(parameter, rows)
        self._memory[parameter] = parameter._local_tensor  # noqa: SLF001 - `rows` is detached from it
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_cut(key, value, parameter.shape):
                dtype = rows.dtype if value.is_floating_point() else value.dtype
                # Cut where it lies: on the host there is room for all of it.
                part = local_of(sharded_like(value, parameter))
                state[key] = dtensor_of(part.to(device=rows.device, dtype=dtype), parameter)

    def add_whole(self, wholes: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
        """Show whole parameters, and keep the state of those alone.

        Args:
            wholes: What is shown for each parameter; ``None`` for those that other ranks step.
        """
        for parameter, whole in wholes.items():
            if whole is not None:
                self.of[parameter] = whole
            elif parameter in self._optimizer.state:
                del self._optimizer.state[parameter]

    def move_state(self) -> None:
        """Move state that is not cut to the devices and formats of the parameters, as `place_model` does.

        It is small, or of a parameter that this rank steps whole. What `add_rows` has cut is there.
        """
        if self._optimizer.state:
            self._optimizer.load_state_dict(self._optimizer.state_dict())

    def point_at_rows(self) -> None:
        """Let the views of rows have the current memory of the rows and their gradients."""
        for parameter, view in self._rows.items():
            rows, gradient = parameter._local_tensor, GRADIENT.__get__(parameter)  # noqa: SLF001 - `_local`, a call less
            if rows is not self._memory[parameter]:
                view.data = self._memory[parameter] = rows
            view.grad = None if gradient is None else gradient._local_tensor  # noqa: SLF001 - as above

    def drop_gradients(self) -> None:
        """Let the views of rows have no gradients."""
        for view in self._rows.values():
            view.grad = None

    def show(self) -> None:
        """Let the optimizer's groups and state hold the views, with plain tensors as their state."""
        if self._lists is not None:
            return
        self._lists = [self._show_group(group) for group in self._optimizer.param_groups]
        for parameter, state in self._taken_states():
            self._optimizer.state[self.of.get(parameter, parameter)] = state
            if parameter in self._rows:
                _change(state, DTensor, lambda _, tensor: _noted(self._known, tensor))

    def hide(self) -> None:
        """Let the optimizer's groups and state hold the model's parameters and DTensors."""
        if self._lists is None:
            return
        for group, listed in zip(self._optimizer.param_groups, self._lists, strict=True):
            group.update(listed)
        parameter_of: dict[Any, Any] = {view: parameter for parameter, view in self.of.items()}
        for view, state in self._taken_states():
            parameter = parameter_of.get(view, view)
            self._optimizer.state[parameter] = state
            if parameter in self._rows:
                _change(state, torch.Tensor, functools.partial(_sharded, self._known, parameter))
        self._lists, self._known = None, {}

    def _taken_states(self) -> list[tuple[Any, Any]]:
        """Take all states from the optimizer, or from the one that it wraps, and return them by what it steps on."""
        taken = [*self._optimizer.state.items()]
        self._optimizer.state.clear()
        return taken

    def _show_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Let a group list the views, and return its lists from before."""
        shown = [number for number, parameter in enumerate(group["params"]) if parameter in self.of]
        before: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
        group.update({key: [listed[number] for number in shown] for key, listed in before.items()})
        group["params"] = [self.of[parameter] for parameter in group["params"]]
        return before


def _noted(known: dict[int, DTensor], tensor: DTensor) -> torch.Tensor:
    """Return a DTensor's local values, and remember whose they are."""
    local = _local(tensor)
    known[id(local)] = tensor
    return local


def _sharded(known: Mapping[int, DTensor], parameter: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor that a state's local values are of: the one from before, or a new one."""
    if id(tensor) not in known and is_cut(key, tensor, _local(parameter).shape):
        return dtensor_of(tensor, parameter)
    return known.get(id(tensor), tensor)


def _change(state: dict[str, Any], kind: type[torch.Tensor], change: Callable[[str, Any], torch.Tensor]) -> None:
    """Replace the tensors of a class in a parameter's state, also those inside of lists and dicts."""
    for key, value in state.items():
        if isinstance(value, kind):
            state[key] = change(key, value)
        elif isinstance(value, (dict, list, tuple)):
            state[key] = tree_map_only(kind, functools.partial(change, key), value)


def _local(tensor: Any) -> torch.Tensor:
    """Return a DTensor's local values, at less cost than `local_of`, which detaches them."""
    local: torch.Tensor = tensor._local_tensor  # noqa: SLF001
    return local


class WholeParameters:
    """Gather and scatter parameters that an optimizer needs whole, each on one rank of a replica.

    Args:
        parameters: DTensors, or replicated.
        ranks: The ranks of a replica.
        by_matrix: Whether the optimizer updates matrices by themselves, so that work goes by their products.
        loads: What each rank of a replica has to do already; what these parameters cost is added.

    Attributes:
        wholes: What the optimizer steps on for each parameter: a tensor that has memory during a step only, or the
            parameter itself if it is replicated; ``None`` for parameters of other owners.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: ShardingRanks, loads: list[int], *, by_matrix: bool
    ) -> None:
        self._ranks = ranks
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        self._owner = _owners(sharded, loads, by_matrix=by_matrix)
        self.wholes: dict[nn.Parameter, nn.Parameter | None] = {}
        self._gathered: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter not in self._owner:
                self.wholes[parameter] = parameter
            elif self._owner[parameter] == ranks.shard_rank:
                values = _without_memory(parameter)
                self.wholes[parameter] = shown_for(parameter, values)
            else:
                self.wholes[parameter] = None

    def gather(self, *, all_parameters: bool = False) -> None:
        """Send the parameters that have gradients, and the gradients, to their owners.

        Args:
            all_parameters: Send all parameters, and no gradients.

        Collective: the shard group.
        """
        self._gathered = list(self._owner) if all_parameters else [p for p in self._owner if p.grad is not None]
        operations, received = [], []
        for parameter in self._gathered:
            whole = self.wholes[parameter]
            rows = [local_of(parameter)]
            if not all_parameters:
                rows.append(local_of(parameter.grad))  # type: ignore[arg-type]
            if whole is None:
                operations += [self._transfer(dist.isend, part, self._owner[parameter]) for part in rows]
                continue
            made = [part.new_empty(parameter.shape) for part in rows]
            whole.data, whole.grad = made[0], None if all_parameters else made[1]
            for tensor, own in zip(made, rows, strict=True):
                for rank, part in self._parts(parameter, tensor):
                    if rank == self._ranks.shard_rank:
                        part.copy_(own)
                    else:
                        buffer = part if part.is_contiguous() else part.new_empty(part.shape)
                        operations.append(self._transfer(dist.irecv, buffer, rank))
                        received.append((part, buffer))
        _run(operations)
        for part, buffer in received:
            if buffer is not part:
                part.copy_(buffer)

    def scatter(self) -> None:
        """Send the updated parameters back to the ranks of their rows, and free the whole parameters.

        Collective: the shard group.
        """
        operations = []
        for parameter in self._gathered:
            whole, rows = self.wholes[parameter], local_of(parameter)
            if whole is None:
                operations.append(self._transfer(dist.irecv, rows, self._owner[parameter]))
                continue
            for rank, part in self._parts(parameter, whole.data):
                if rank == self._ranks.shard_rank:
                    rows.copy_(part)
                else:
                    operations.append(self._transfer(dist.isend, part.contiguous(), rank))
        _run(operations)
        for parameter in self._gathered:
            whole = self.wholes[parameter]
            if whole is not None:
                whole.grad = None
                whole.data = _without_memory(parameter)

    def _parts(self, parameter: Any, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of a whole tensor with the ranks that keep them; the last ranks may have none."""
        dim = parameter.placements[-1].dim
        yield from enumerate(whole.chunk(self._ranks.shard_size, dim))

    def _transfer(self, call: Any, part: Tensor, peer: int) -> dist.P2POp | None:
        return dist.P2POp(call, part, group=self._ranks.shard_group, group_peer=peer) if part.numel() else None


def _run(operations: Sequence[dist.P2POp | None]) -> None:
    listed = [operation for operation in operations if operation is not None]
    if listed:
        for work in dist.batch_isend_irecv(listed):
            work.wait()


def _owners(parameters: Sequence[nn.Parameter], loads: list[int], *, by_matrix: bool) -> dict[nn.Parameter, int]:
    """Assign parameters to owners, balanced by cost: the largest first, to the rank with the least to do."""
    costs = [(step_cost(parameter, by_matrix=by_matrix), parameter) for parameter in parameters]
    owner = {}
    for cost, parameter in sorted(costs, key=lambda item: -item[0]):
        rank = loads.index(min(loads))
        owner[parameter] = rank
        loads[rank] += cost
    return owner


def _without_memory(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's shape, dtype and device with the memory of one element."""
    return torch.zeros((), dtype=parameter.dtype, device=local_of(parameter).device).expand(parameter.shape)
