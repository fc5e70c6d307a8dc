"""`DDPModel`: the user's model in torch's wrapper, and copies of it that are evaluated."""

from __future__ import annotations

import copy
from typing import Any

from booster_core.plugin import ModelWrapper
from booster_runtime.sharding import refuse_all_gradients


class DDPModel(ModelWrapper):
    """The user's model in torch's ``DistributedDataParallel``, whose arguments are those of `ModelWrapper`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy to evaluate with, such as an average: it has this model's values, and no optimizer."""
        module = copy.deepcopy(self.unwrap(), memo)
        refuse_all_gradients(module)
        copied = ModelWrapper(module, precision=self.precision)
        copied.training = self.training
        memo[id(self)] = copied
        return copied
