"""`ZeroModel`: the user's model run in the working precision, which waits for its parameters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.plugin import ModelWrapper
from booster_core.precision import cast_floating
from booster_core.ranks import ObservedCall
from booster_runtime.sharding import refuse_all_gradients

if TYPE_CHECKING:
    from booster_core.precision import PrecisionPolicy
    from booster_zero.engine.engine import ShardedEngine


class ZeroModel(ModelWrapper):
    """The user's model, whose parameters are views of buckets.

    Args:
        module: The user's model.
        precision: Precision of the run. Compute in a narrow format runs under autocast, although the parameters
            have that format: inputs and buffers may then be wider.
        sharded: The sharded parameters; ``None`` where nothing is trained.
    """

    def __init__(self, module: nn.Module, *, precision: PrecisionPolicy | None, sharded: ShardedEngine | None) -> None:
        super().__init__(module, precision=precision)
        self._sharded = sharded

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroModel:
        """Return a copy to evaluate with, such as an average: it has this model's values, and no optimizer."""
        module = copy.deepcopy(self.unwrap(), memo)
        refuse_all_gradients(module)
        copied = type(self)(module, precision=self.precision, sharded=None)
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, as by ``torch.save``, the user's model, which is whole here, without the optimizer."""
        if self._sharded is None:
            return super().__reduce_ex__(protocol)
        plain = type(self)(self.unwrap(), precision=self.precision, sharded=None)
        plain.training = self.training
        return plain.__reduce_ex__(protocol)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating outputs of a narrow compute format come back in the policy's ``output_dtype``."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with ObservedCall("forward"):  # not counted: replicas may evaluate on more or fewer batches than others
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sharded is None:
            return self._run(*args, **kwargs)
        self._sharded.reducer.watch()
        if not self._sharded.gatherer.is_underway:
            return self._run(*args, **kwargs)
        with self._sharded.gatherer.during_forward(self.module):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        precision, module = self.precision, self.module
        if precision is None or not precision.uses_autocast:
            return module(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=precision.compute_dtype):
            outputs = module(*args, **kwargs)
        return cast_floating(outputs, precision.output_dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, those in shards as well."""
        super().zero_grad(set_to_none)
        for optimizer in self.boosted_optimizers:
            optimizer.zero_grad(set_to_none)
