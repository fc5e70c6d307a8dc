"""A model's state seen through another adapter, for what is written like a model and is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
