"""A model's state seen through another adapter, for what is written like a model and is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from booster_core.state.adapter import JSONValue, ParamGroup, ShardFollower, StateAdapter, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from booster_core.state.shard import TensorShard


class ModelView(StateAdapter):
    """Shows some of a model's tensors, without ties, extra state and optimizer; subclasses say which.

    Args:
        inner: The model's own adapter.
    """

    def __init__(self, inner: StateAdapter) -> None:
        self.inner = inner

    @property
    def keeps_values(self) -> bool:
        return self.inner.keeps_values

    def model_shards(self) -> Iterator[TensorShard]:
        return self.inner.model_shards()

    def tied_names(self) -> Mapping[str, str]:
        return {}

    def extra_state(self) -> Mapping[str, object]:
        return {}

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        """Do nothing: there is none."""

    def optimizer_shards(self) -> Iterator[TensorShard]:
        return iter(())

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        return {}

    def param_groups(self) -> Sequence[ParamGroup]:
        return ()

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Do nothing: there is no optimizer."""

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        """Do nothing: nothing is derived from these values."""


class PartView(ModelView):
    """Shows one module of a model as if it were the model: its tensors by the names that they have in it.

    Args:
        inner: The model's adapter.
        name: The module's name in the model.
    """

    def __init__(self, inner: StateAdapter, name: str) -> None:
        super().__init__(inner)
        self._prefix = f"{name}."
        self._aliases: dict[str, list[str]] = {}
        for alias, first in inner.tied_names().items():
            self._aliases.setdefault(first, []).append(alias)

    def names_in_part(self, first: str) -> list[str]:
        """Return the names in the module of a tensor, by its first name in the model; none if it is not in it."""
        names = (first, *self._aliases.get(first, ()))
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def model_shards(self) -> Iterator[TensorShard]:
        return self._renamed(self.inner.model_shards())

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        return self._renamed(self.inner.export_shards({self._whole_name(name): each for name, each in dtypes.items()}))

    def model_targets(self, stored: Mapping[str, TensorMeta]) -> Iterator[TensorShard]:
        return self._renamed(self.inner.model_targets({self._whole_name(name): each for name, each in stored.items()}))

    def follow(self, follower: ShardFollower) -> None:
        self.inner.follow(follower)

    def place(self, shard: TensorShard) -> Iterator[TensorShard]:
        return self._renamed(self.inner.place(shard))

    def tied_names(self) -> Mapping[str, str]:
        every = map(self.names_in_part, self._aliases)
        return {alias: names[0] for names in every for alias in names[1:]}

    def extra_state(self) -> Mapping[str, object]:
        values = self.inner.extra_state().items()
        return {name.removeprefix(self._prefix): each for name, each in values if name.startswith(self._prefix)}

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self.inner.load_extra_state({f"{self._prefix}{name}": each for name, each in values.items()})

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        self.inner.finish_load(model=model, optimizer=optimizer)

    def _renamed(self, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
        for shard in shards:
            for name in self.names_in_part(shard.name)[:1]:
                yield replace(shard, name=name)

    def _whole_name(self, name: str) -> str:
        whole = f"{self._prefix}{name}"
        return self.inner.tied_names().get(whole, whole)
