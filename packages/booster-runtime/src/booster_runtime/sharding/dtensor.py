"""``DTensor`` state as shards, for any placement on any mesh, and the adapter for plugins built on DTensors.

Parameters, gradients and optimizer state may be DTensors or plain tensors. Every rank holds plain tensors whole; their
ownership is divided as in `booster_core.state.replicated`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typing_extensions import override

from booster_core.errors import CheckpointError
from booster_core.state import NamedTensors, ReplicatedStateAdapter, TensorShard, balanced_shards
from booster_runtime.sharding.placements import Split, local_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.ranks import DistCoordinator
    from booster_core.state import JSONValue, ParamGroup, TensorMeta


def dtensor_shards(name: str, state: str | None, tensor: DTensor) -> Iterator[TensorShard]:
    """Yield this rank's parts of a DTensor; ``data`` are views of its local tensor.

    Of ranks that hold the same part, the first along each replicated axis of the mesh owns it.

    Args:
        name: The tensor's name.
        state: Name of the optimizer state; ``None`` for the model's tensors.
        tensor: The tensor.

    Raises:
        CheckpointError: If its placement is partial, so that values still need summing, or is unknown.
    """
    place = _Place.of(tensor, name if state is None else f"{name}/{state}")
    local = local_of(tensor)
    for box, held in local_boxes(tuple(tensor.shape), place.splits):
        yield TensorShard(
            name=name,
            state=state,
            global_shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            box=box,
            data=_window(local, held),
            is_owner=place.is_first_replica,
        )


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's values, detached: the local tensor of a DTensor, or a plain tensor itself."""
    values: Any = tensor.detach()
    local: Tensor = values._local_tensor if isinstance(tensor, DTensor) else values  # noqa: SLF001 - `to_local` builds a graph node
    return local


def sharded_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return a tensor of a DTensor's shape placed as that one is; every rank passes the same values.

    Args:
        whole: The values, in the DTensor's shape; device and dtype are kept.
        like: Says how to place them.
    """
    place = _Place.of(like, "the tensor")
    local = whole.new_empty(local_of(like).shape)
    for box, held in local_boxes(tuple(like.shape), place.splits):
        _window(local, held).copy_(_window(whole.detach(), box))
    return dtensor_of(local, like)


def dtensor_of(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor over this rank's values, placed as another one; the values keep their memory, dtype and device.

    Args:
        local: This rank's part, in the shape of that of ``like``.
        like: The other DTensor.
    """
    # Not `DTensor.from_local`, which moves what is offloaded to the device of the mesh.
    spec: Any = like._spec  # noqa: SLF001
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    make: Any = DTensor
    made: DTensor = make(local, replace(spec, tensor_meta=meta), requires_grad=False)
    return made


class DTensorStateAdapter(ReplicatedStateAdapter):
    """Shows a model (and optimizer) whose tensors are DTensors or plain.

    The optimizer's groups list the model's own parameters, as after ``fully_shard`` or ``parallelize_module``.

    Args:
        model: The model, wrapped or not.
        optimizer: Its optimizer, wrapped or not; or several, each with parameters of its own.
        coordinator: The ranks that hold equal copies of plain tensors.
        prepare: Called before tensors are listed, for strategies that register other tensors in between.

    Raises:
        ConfigError: If the optimizer holds a parameter that the model lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        coordinator: DistCoordinator,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._prepare = prepare or (lambda: None)
        self._prepare()
        super().__init__(model, optimizer, coordinator)

    @override
    def model_shards(self) -> Iterator[TensorShard]:
        self._prepare()
        named = NamedTensors.of(self._module)
        yield from self._shards(
            ((name, None, tensor) for name, tensor in named.tensors.items()), of_first=named.buffers
        )

    @override
    def tied_names(self) -> Mapping[str, str]:
        self._prepare()
        return super().tied_names()

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        self._prepare()
        yield from self._shards(self._state_tensors())

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        self._prepare()
        super().prepare_optimizer_load(tensors, scalars, groups)
        for optimizer in self._required_optimizers():
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, DTensor):
                    for key, value in state.items():
                        state[key] = _placed_beside(key, value, parameter)

    def _shards(
        self, tensors: Iterable[tuple[str, str | None, Tensor]], of_first: Collection[str] = ()
    ) -> Iterator[TensorShard]:
        plain = []
        for name, state, tensor in tensors:
            if isinstance(tensor, DTensor):
                yield from dtensor_shards(name, state, tensor)
            else:
                plain.append((name, state, tensor))
        yield from balanced_shards(plain, self._rank, self._world_size, of_first=of_first)


class _Place:
    """How a DTensor is cut, and whether this rank is the first of those that hold the same part.

    Args:
        splits: Its cuts in the order of the mesh's axes.
        is_first_replica: Whether this rank writes its part.
    """

    def __init__(self, splits: Sequence[Split], *, is_first_replica: bool) -> None:
        self.splits = splits
        self.is_first_replica = is_first_replica

    @classmethod
    def of(cls, tensor: DTensor, what: str) -> _Place:
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            msg = f"'{what}' is on a mesh that this rank is not part of: {mesh}."
            raise CheckpointError(msg)
        splits, is_first = [], True
        placements: Sequence[Any] = tensor.placements
        for axis, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                is_first = is_first and coordinate[axis] == 0
            # torch derives `_StridedShard` from `Shard` in some versions and from nothing but `Placement` in others.
            elif isinstance(placement, Shard) or hasattr(placement, "split_factor"):
                splits.append(
                    Split(
                        dim=placement.dim % max(tensor.ndim, 1),
                        parts=mesh.size(axis),
                        index=coordinate[axis],
                        split_factor=getattr(placement, "split_factor", 1),
                    )
                )
            else:
                msg = (
                    f"'{what}' is placed as {placement} on axis {axis} of its mesh, so no rank holds its values. "
                    "Redistribute it to Shard or Replicate first."
                )
                raise CheckpointError(msg)
        return cls(splits, is_first_replica=is_first)


def _window(tensor: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _placed_beside(key: str, value: Any, parameter: DTensor) -> Any:
    """Return a parameter's state so that torch can combine it with the parameter: whole ones on its mesh as well."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if key == "step" or not is_plain or not value.dim():
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)
