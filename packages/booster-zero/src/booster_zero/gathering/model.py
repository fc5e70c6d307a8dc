"""`GatheringModel`: gathers a boosted model's parameters for a block of code, and for its ``state_dict``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.plugin import ModelWrapper
from booster_core.ranks import NamedCall
from booster_runtime.local_state import refuse_pickle
from booster_runtime.sharding import generate_together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_zero.engine.engine import ShardedEngine
    from booster_zero.engine.gatherer import Gatherer


class GatheringModel(ModelWrapper):
    """A boosted model whose parameters are in buckets, and whole only while they are used.

    Attributes:
        gatherer: Gathers its parameters; set by `attach_gatherer`.

    ``state_dict`` and `whole_parameters` gather; every rank must call them.
    """

    gatherer: Gatherer
    _sharded: ShardedEngine | None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``.

        Raises:
            CheckpointError: Always.
        """
        refuse_pickle()

    def attach_gatherer(self, gatherer: Gatherer) -> None:
        """Set what gathers the user's model."""
        self.gatherer = gatherer
        generate_together(self)

    def _before_forward(self) -> None:
        if self._sharded is not None:
            self._sharded.reducer.watch()
            self._sharded.reducer.hide_stand_ins()

    def _after_forward(self) -> None:
        if self._sharded is not None:
            self._sharded.reducer.show_stand_ins()

    @contextlib.contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters of the user's model whole on every rank for the block.

        Args:
            writes: Keep what the block writes into them in place; it must write the same on every rank.

        Raises:
            ConfigError: If the block writes without ``writes``, or gives a parameter other memory.

        Memory: the whole model on every rank.

        Collective: every rank of the world.
        """
        with self.gathered(writes=writes):
            yield
        if not writes:
            self.gatherer.tell_changes()

    @contextlib.contextmanager
    def gathered(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters whole for the block, as `whole_parameters` does, whose end no rank waits for.

        What a block without ``writes`` has written, `Gatherer.take_changes` returns after it.

        Args:
            writes: As for `whole_parameters`.

        Collective: every rank of the world at the beginning; none at the end.
        """
        buckets = self.gatherer.layout.buckets
        for bucket in buckets:
            bucket.pins += 1
        try:
            for bucket in buckets:
                self.gatherer.use(bucket)
            yield
            if writes:
                for bucket in buckets:
                    bucket.write_back()
                    bucket.mark_changed()
        finally:
            for bucket in buckets:
                bucket.pins = max(bucket.pins - 1, 0)
            self.gatherer.end()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return copies of the user's model's whole state, on every rank; see `Booster.save_model` for files.

        Collective: every rank of the world.
        """
        with NamedCall("state_dict"), self.whole_parameters():
            state = super().state_dict(*args, **kwargs)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.detach().clone()
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a whole state, the same on every rank, into the user's model; see `Booster.load_model` for files.

        Collective: every rank of the world.
        """
        with NamedCall("load_state_dict"), self.whole_parameters(writes=True):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
