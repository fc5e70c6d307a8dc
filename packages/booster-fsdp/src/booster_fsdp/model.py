"""`FSDPModel`: wraps the sharded model; methods such as ``generate`` run gathered and in the run's precision."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper, through_guard
from booster_core.ranks import NamedCall
from booster_runtime.local_state import refuse_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from booster_core.precision import PrecisionPolicy
    from booster_fsdp.optimizer import FSDPOptimizer
    from booster_fsdp.units import Units

_MIXED = "got mixed torch.Tensor and DTensor"
"""What torch says where a sharded parameter meets a plain tensor."""


class FSDPModel(ModelWrapper):
    """Wrap a model that was sharded in place.

    Args:
        module: The user's model.
        units: Its units.
        precision: What autocast applies; ``None`` for none.
        forward_methods: Methods other than ``forward`` that run with gathered parameters.
    """

    def __init__(
        self, module: nn.Module, *, units: Units, precision: PrecisionPolicy | None, forward_methods: Sequence[str]
    ) -> None:
        super().__init__(module, precision=precision)
        self.__dict__["units"] = units
        # `torch.distributed.checkpoint` asks for it next to `named_buffers`, which lists the user's.
        self.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set  # noqa: SLF001
        self.__dict__["optimizer"] = None
        self.__dict__["_forward_methods"] = frozenset(forward_methods)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse a copy: torch ties the shards to this model's hooks.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "A model whose parameters are split over the ranks can't be copied. For a running mean of the parameters "
            "use `booster.ema(model)`; or copy the model before `boost`, and boost the copy as well."
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``.

        Raises:
            CheckpointError: Always.
        """
        refuse_pickle()

    def attach_optimizer(self, optimizer: FSDPOptimizer | None) -> None:
        """Set the optimizer that holds the gradients of the model's shards."""
        self.__dict__["optimizer"] = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not."""
        self.units.reshard()
        self.units.forget()
        super().zero_grad(set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's model as this rank holds it; see `Booster.save_model` for files."""
        self.units.reshard()
        return super().state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters under their names in the user's model, also after an evaluation."""
        self.units.reshard()
        return super().named_parameters(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` that names leave out the attribute ``module``."""
        return {"": "module"}

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in self.__dict__.get("_forward_methods", ()):
            return functools.partial(self._run, value)
        return value

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_updates()
        if torch.compiler.is_compiling():  # graphs can't break inside of a `try`
            return super()._forward(*args, **kwargs)
        try:
            return super()._forward(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            msg = (
                "The model uses a parameter of a unit outside of the unit's forward, where it is sharded, as losses do "
                f"that take the head's weight ({error}). Choose the units yourself, without that module: "
                "`TorchFSDPPlugin(unit_classes=[...])` with the classes of the layers. What belongs to no unit is "
                "gathered for the whole forward."
            )
            raise ConfigError(msg) from error

    def _notice_updates(self) -> None:
        # For steps of an optimizer that is not ours. Not compiled: Dynamo can't trace the version counters.
        if self.optimizer is None and not torch.compiler.is_compiling():
            self.units.notice_updates()

    @through_guard
    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._notice_updates()
        precision = self.precision
        enabled = precision is not None and precision.uses_autocast
        dtype = precision.compute_dtype if precision is not None and enabled else None
        with NamedCall("forward"), torch.autocast(self._device_type, dtype=dtype, enabled=enabled):
            return method(*args, **kwargs)
