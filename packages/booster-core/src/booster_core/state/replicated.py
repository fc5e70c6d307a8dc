"""The adapter for plugins that keep the whole model and the whole optimizer on every rank.

Each rank owns an equal share of the bytes, so that all of them write: the tensors, put one after the other, are one
long range that is cut into as many equal parts as there are ranks. A large tensor may thus be owned in flat
pieces; a small one belongs to the rank whose part contains its middle. Buffers belong to the first rank: forward may
change them differently on every rank, as BatchNorm does, and a model is saved with those of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError, ConfigError
from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter
from booster_core.state.names import NamedTensors, extra_state_modules
from booster_core.state.optimizer_state import MASTER, ListedGroup, unsaved_state
from booster_core.state.shard import TensorShard, full_box

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.ranks import DistCoordinator
    from booster_core.state.adapter import TensorMeta

_SMALLEST_CUT_BYTES = 1 << 20
"""Smaller tensors are not cut: a write costs more than the balance is worth."""


@dataclass(frozen=True)
class Replica:
    """A rank among those that hold the same part of a model; a `DistCoordinator` is one, among all ranks.

    Args:
        rank: Its index.
        world_size: Their number.
    """

    rank: int
    world_size: int


class ReplicatedStateAdapter(StateAdapter):
    """Shows a model (and optimizer) of which every rank has all of it.

    Args:
        model: The model, wrapped or not.
        optimizer: Its optimizer, wrapped or not; or several, each with parameters of its own.
        coordinator: Tells rank and number of ranks.
        of_first: Names of parameters that may differ between ranks; the first rank's are saved.
        held_by: For parameters of which other ranks hold other parts, by name: this rank's place among those that hold
            the same part.

    Raises:
        ConfigError: If the optimizer holds a parameter that the model lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        coordinator: DistCoordinator | Replica,
        *,
        of_first: Collection[str] = (),
        held_by: Mapping[str, Replica] | None = None,
    ) -> None:
        from booster_core.plugin import unwrap_model  # whose wrappers import the names of this package

        self._module = unwrap_model(model)
        given = () if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self._optimizers = tuple(map(unwrap_optimizer, given))
        self._rank = coordinator.rank
        self._world_size = coordinator.world_size
        self._of_first = frozenset(of_first)
        self._held_by = held_by or {}
        self._masters: set[str] = set()
        if self._optimizers:
            self._groups()  # raises for other parameters

    @property
    def keeps_values(self) -> bool:
        return True

    def model_shards(self) -> Iterator[TensorShard]:
        return self.model_shards_without(())

    def model_shards_without(self, left_out: Collection[str]) -> Iterator[TensorShard]:
        """Yield `model_shards` but for parameters of which ranks hold parts, by name."""
        named = NamedTensors.of(self._module)
        everywhere = Replica(self._rank, self._world_size)
        names = [name for name in named.tensors if name not in left_out]
        places = {name: self._held_by.get(name, everywhere) for name in names}
        for place in dict.fromkeys([everywhere, *places.values()]):
            yield from balanced_shards(
                ((name, None, named.tensors[name]) for name in names if places[name] == place),
                place.rank,
                place.world_size,
                of_first=named.buffers | self._of_first,
            )

    def tied_names(self) -> Mapping[str, str]:
        return NamedTensors.of(self._module).aliases

    def extra_state(self) -> Mapping[str, object]:
        return {name: module.get_extra_state() for name, module in extra_state_modules(self._module).items()}

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        for name, module in extra_state_modules(self._module).items():
            if name in values:
                module.set_extra_state(values[name])

    def optimizer_shards(self) -> Iterator[TensorShard]:
        yield from balanced_shards(self._state_tensors(), self._rank, self._world_size, of_first=self._of_first)

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        return {name: scalars for group in self._groups() for name, _, scalars in group.states() if scalars}

    def unsaved_state(self) -> Sequence[str]:
        return [key for optimizer in self._required_optimizers() for key in unsaved_state(optimizer)]

    def param_groups(self) -> Sequence[ParamGroup]:
        return [group.described() for group in self._groups()]

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        self._masters = set()
        for group, saved in zip(self._groups(), groups, strict=True):
            group.set_options(saved.options)
            for name in group.names:
                stored = tensors.get(name, {})
                state = group.restore(name, stored, scalars.get(name, {}))
                if MASTER in stored and MASTER not in state:
                    # Without masters of its own, a run takes the true values as its parameters.
                    self._masters.add(name)

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        del model, optimizer
        self._masters = set()

    def _state_tensors(self) -> Iterator[tuple[str, str | None, Tensor]]:
        groups = self._groups()
        for group in groups:
            for name, tensors, _ in group.states():
                for state, tensor in tensors.items():
                    yield name, state, tensor
        for group in groups:
            for name in group.names:
                if name in self._masters:
                    yield name, MASTER, group.tensors[name]

    def _groups(self) -> list[ListedGroup]:
        """Return the parameter groups of all optimizers, by the names of what they list."""
        name_of = self._name_of()
        groups = []
        listed = [(group, optimizer) for optimizer in self._required_optimizers() for group in optimizer.param_groups]
        for index, (group, optimizer) in enumerate(listed):
            unknown = [position for position, parameter in enumerate(group["params"]) if id(parameter) not in name_of]
            if unknown:
                msg = (
                    f"Parameters {unknown[:10]} of the optimizer's group {index} are not parameters of the model "
                    f"({type(self._module).__name__}). Build the optimizer from this model's parameters."
                )
                raise ConfigError(msg)
            tensors = {name_of[id(parameter)]: parameter for parameter in group["params"]}
            groups.append(ListedGroup(optimizer=optimizer, group=group, names=(*tensors,), tensors=tensors))
        return groups

    def _name_of(self) -> Mapping[int, str]:
        """Return the names of the tensors that the groups may list, by ``id``."""
        return NamedTensors.of(self._module).name_of

    def _required_optimizers(self) -> tuple[Optimizer, ...]:
        if not self._optimizers:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self._optimizers


def balanced_shards(
    tensors: Iterable[tuple[str, str | None, Tensor]], rank: int, world_size: int, *, of_first: Collection[str] = ()
) -> Iterator[TensorShard]:
    """Yield all tensors as shards held here, of which this rank owns an equal share of the bytes.

    Args:
        tensors: Name, state and values of each tensor, the same on every rank.
        rank: This rank.
        world_size: Number of ranks that hold the same.
        of_first: Names of tensors that the first rank owns whole, besides its share, because ranks' values may differ.
    """
    listed = list(tensors)
    total = sum(tensor.numel() * tensor.element_size() for name, _, tensor in listed if name not in of_first)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    offset = 0
    for name, state, tensor in listed:
        nbytes = tensor.numel() * tensor.element_size()
        tensor = tensor.detach()  # noqa: PLW2901 - the values are meant from here on
        if name in of_first:
            yield _shard(name, state, tensor, is_owner=rank == 0)
            continue
        if nbytes < _SMALLEST_CUT_BYTES or not tensor.is_contiguous():
            middle = min(offset + nbytes // 2, max(total - 1, 0))
            yield _shard(name, state, tensor, is_owner=first <= middle < last or (total == 0 and rank == 0))
        else:
            itemsize = tensor.element_size()
            start, stop = (min(max(edge - offset, 0), nbytes) // itemsize for edge in (first, last))
            for flat, is_owner in (((0, start), False), ((start, stop), True), ((stop, tensor.numel()), False)):
                if flat == (0, tensor.numel()):
                    yield _shard(name, state, tensor, is_owner=is_owner)
                elif flat[0] < flat[1]:
                    yield _shard(name, state, tensor, is_owner=is_owner, flat=flat)
        offset += nbytes


def _shard(
    name: str, state: str | None, tensor: Tensor, *, is_owner: bool, flat: tuple[int, int] | None = None
) -> TensorShard:
    shape = tuple(tensor.shape)
    return TensorShard(
        name=name,
        state=state,
        global_shape=shape,
        dtype=tensor.dtype,
        box=full_box(shape),
        flat=flat,
        data=tensor if flat is None else tensor.view(-1)[flat[0] : flat[1]],
        is_owner=is_owner,
    )


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the user's own optimizer, below our wrappers."""
    while callable(getattr(optimizer, "unwrap", None)):
        inner = optimizer.unwrap()
        if inner is optimizer:
            break
        optimizer = inner
    return optimizer  # type: ignore[no-any-return]
