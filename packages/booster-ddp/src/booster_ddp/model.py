"""`DDPModel`: the user's model in torch's wrapper, and copies of it that are evaluated."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from booster_core.plugin import ModelWrapper
from booster_runtime.sharding import refuse_all_gradients

if TYPE_CHECKING:
    from torch import nn

    from booster_core.precision import PrecisionPolicy


class DDPModel(ModelWrapper):
    """The user's model in torch's ``DistributedDataParallel``, whose arguments are those of `ModelWrapper`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy to evaluate with, such as an average: it has this model's values, and no optimizer."""
        module = copy.deepcopy(self.unwrap(), memo)
        refuse_all_gradients(module)
        copied = _wrapped(module, self.precision, self.training)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, as by ``torch.save``, a plain wrapper of the user's model, which is whole here."""
        del protocol
        return _wrapped, (self.unwrap(), self.precision, self.training)


def _wrapped(module: nn.Module, precision: PrecisionPolicy | None, training: bool) -> ModelWrapper:  # noqa: FBT001 - in pickles
    """Return a plain wrapper of a model, in the mode in which the boosted model was."""
    wrapper = ModelWrapper(module, precision=precision)
    wrapper.training = training
    return wrapper
