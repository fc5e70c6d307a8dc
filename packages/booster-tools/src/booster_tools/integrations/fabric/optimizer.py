"""`DelegatingOptimizer`: a boosted optimizer that Fabric can wrap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer

if TYPE_CHECKING:
    from booster_core.plugin import OptimizerWrapper


def _forwarded(name: str) -> Any:
    def call(delegating: DelegatingOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(delegating.boosted, name)(*args, **kwargs)

    return call


class DelegatingOptimizer(Optimizer):
    """A boosted optimizer that finds its attributes in the one it stands for.

    Fabric derives a class from that of the optimizer and calls its methods on an object of its own, which does not have
    the attributes that a boosted optimizer changes.
    """

    def __init__(self, boosted: OptimizerWrapper) -> None:
        self.__dict__["boosted"] = boosted

    param_groups = property(lambda self: self.boosted.param_groups)
    state = property(lambda self: self.boosted.state)

    def __getattr__(self, name: str) -> Any:
        if name == "boosted":  # while copying or unpickling
            raise AttributeError(name)
        return getattr(self.boosted, name)

    step, zero_grad, add_param_group, state_dict, load_state_dict = map(
        _forwarded, ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")
    )


def inner_optimizer(optimizer: Optimizer) -> OptimizerWrapper:
    """Return the boosted optimizer that another stands for; a boosted one as it is."""
    inner: Any = optimizer.boosted if isinstance(optimizer, DelegatingOptimizer) else optimizer
    return cast("OptimizerWrapper", inner)
