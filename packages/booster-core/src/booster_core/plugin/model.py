"""What `Booster.boost` returns in place of the user's model, and how to get from one to the other.

A `ModelWrapper` behaves as the model inside: attributes are forwarded, and ``unwrap()`` returns the user's own object.
A strategy subclasses it where its forward differs.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin.guards import Structure, guard_forward, through_guard
from booster_core.precision.casting import autocast_parts, cast_floating
from booster_core.ranks.calls import NamedCall
from booster_core.state.names import compiled_module, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Self

    from booster_core.plugin.interface import BoostContext
    from booster_core.plugin.optimizer import OptimizerWrapper
    from booster_core.precision.policy import PrecisionPolicy


class ModelWrapper(nn.Module):
    """A boosted model: runs the user's model in the run's precision, through the strategy's own forward.

    Args:
        module: What forward runs: the user's model, or a module of the strategy around it.
        original: The user's model; ``module`` itself where the strategy put nothing around it.
        precision: Precision of the run, applied by autocast where compute is narrower than the parameters; ``None``
            where the strategy applies it itself.

    ``state_dict``, ``load_state_dict`` and attributes are those of the user's model, under its own names, and so are
    items, length and iteration of a container, such as ``nn.Sequential``. Methods other
    than ``forward`` (``generate``) run on the user's model directly. One that calls the model itself raises in training
    (`booster_core.plugin.guards`), because that forward would bypass the strategy.
    """

    boosted_optimizers: tuple[OptimizerWrapper, ...] = ()
    """The optimizers that were boosted with the model."""
    boost_context: BoostContext
    """Of the ``boost`` that returned the model."""
    refuses_use: str | None = None
    """Why its state can't be read now, such as while it is offloaded."""
    replaces_parameters: ClassVar[bool] = False
    """Whether it puts other objects in their place, of the same names and shapes."""
    gathers_in_forward: ClassVar[bool] = False
    """Whether ranks wait for each other in forward."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a strategy's own forward run the user's model."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = through_guard(cls.forward)  # type: ignore[method-assign]

    def __init__(
        self, module: nn.Module, original: nn.Module | None = None, *, precision: PrecisionPolicy | None = None
    ) -> None:
        super().__init__()
        self.module = module
        # Kept out of the module tree: registered a second time, every parameter would be listed twice.
        self.__dict__["_original"] = module if original is None else original
        self.__dict__["_guard"] = guard_forward(self.__dict__["_original"])
        self.__dict__["_methods"] = _Methods()
        first = next(chain(module.parameters(), module.buffers()), None)
        self._device_type = "cpu" if first is None else first.device.type
        self.precision = precision

    def attach(self, optimizers: Sequence[OptimizerWrapper], context: BoostContext) -> None:
        """Note what the model was boosted with; `Booster.boost` calls it.

        Args:
            optimizers: The boosted optimizers of the model, in the order of ``boost``.
            context: Of that ``boost``.
        """
        self.__dict__["boosted_optimizers"] = tuple(optimizers)
        self.__dict__["boost_context"] = context
        self._device_type = context.device.type  # parameters that are offloaded are elsewhere
        if self.precision is not None and self.precision.uses_autocast and "_has_parts" not in self.__dict__:
            self.__dict__["_has_parts"] = True
            inner = without_adapters(self.unwrap())
            parts = (self.unwrap(), inner, *inner.children())
            autocast_parts({id(each): each for each in parts}.values(), self._device_type, self.precision.compute_dtype)

    @property
    def lays_out(self) -> bool:
        """Whether the strategy keeps parameters in memory of its own, so that a script can't move or cast them."""
        return False

    def watch_structure(self) -> None:
        """Let forward raise once the user's model gets other parameters, which the strategy does not know of."""
        self.__dict__["_structure"] = Structure(self.unwrap(), are_replaced=self.replaces_parameters)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        """Move or cast the model, as ``to``, ``half``, ``cpu`` and ``share_memory`` do.

        Raises:
            ConfigError: If the strategy has laid parameters out, and this would change any.
        """
        if not self.lays_out:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            like = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
            if fn(like) is not like or (like.device.type == "cpu" and like.untyped_storage().is_shared()):
                msg = (
                    f"This would move or cast '{name}' ({tensor.dtype}, {tensor.device}), which is kept in memory that "
                    "ranks share out. Move and cast the model before `boost`; `Booster(device=..., "
                    "mixed_precision=...)` say where and in which format it computes."
                )
                raise ConfigError(msg)
        return self

    @property
    def boosted_optimizer(self) -> OptimizerWrapper | None:
        """The optimizer that was boosted with the model, the first of several; ``None`` where there is none."""
        return self.boosted_optimizers[0] if self.boosted_optimizers else None

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield all that this rank keeps of the model and of its optimizers between steps, some of it repeatedly.

        A strategy that keeps memory of its own adds to it.
        """
        parameters = [*self.unwrap().parameters()]
        yield from self.unwrap().buffers()
        for optimizer in self.boosted_optimizers:
            parameters += optimizer.stepped()
            for state in optimizer.unwrap().state.values():
                yield from filter(torch.is_tensor, state.values())
        for parameter in parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad

    def unwrap(self) -> nn.Module:
        """Return the user's own model."""
        original: nn.Module = self.__dict__["_original"]
        return original

    @through_guard
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; under autocast, floating outputs come back in the policy's ``output_dtype``.

        Collective: as the strategy's forward.
        """
        if torch.compiler.is_compiling():  # Dynamo would graph-break on the timer
            return self._forward(*args, **kwargs)
        with NamedCall("forward", is_alone=not self.gathers_in_forward):
            return self._forward(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's model in place, with the arguments of ``torch.compile``; the strategy's part is not."""
        self.unwrap().compile(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision is None or not self.precision.uses_autocast:
            return self.run_module(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=self.precision.compute_dtype):
            outputs = self.run_module(*args, **kwargs)
        return cast_floating(outputs, self.precision.output_dtype)

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``module``, under autocast where the precision asks for it; strategies override it, not call it."""
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients of the model, as its optimizers do."""
        super().zero_grad(set_to_none)
        for optimizer in self.boosted_optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's model as this rank holds it; see `Booster.save_model` for files."""
        return unwrap_model(self).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a state into the user's model as this rank holds it; see `Booster.load_model` for files."""
        return unwrap_model(self).load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank holds under their names in the user's model, as `state_dict` does."""
        return unwrap_model(self).named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under their names in the user's model."""
        return unwrap_model(self).named_buffers(*args, **kwargs)

    @contextlib.contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters of the user's model whole on every rank for the block, as they are here at any time.

        Args:
            writes: Strategies that shard parameters keep what the block writes into them only where this is set. It
                must be the same on every rank.
        """
        del writes
        yield

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:  # while copying or unpickling
                raise
        make = self.__dict__["_methods"].get(name)
        return getattr(self.unwrap(), name) if make is None else make(self)

    # Python looks these up on the type, not by `__getattr__`.

    def __bool__(self) -> bool:
        return bool(self._container())

    def __len__(self) -> int:
        return len(self._container())  # type: ignore[arg-type] # raises what the user's model would

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container())  # type: ignore[call-overload, no-any-return]

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._container())  # type: ignore[call-overload, no-any-return]

    def __contains__(self, item: object) -> bool:
        return item in self._container()  # type: ignore[operator]

    def __getitem__(self, key: Any) -> Any:
        return self._container()[key]  # type: ignore[index]

    def _container(self) -> nn.Module:
        return unwrap_model(self)

    def replace_method(self, name: str, make: Callable[[ModelWrapper], Any]) -> None:
        """Let an attribute of the user's model be what ``make`` returns for this wrapper; copies are not affected."""
        self.__dict__["_methods"][name] = make


class _Methods(dict[str, Any]):
    """The replaced methods of one boosted model; a copy or pickle of the model has none."""

    def __reduce__(self) -> Any:
        return _Methods, ()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module: below our wrappers, ``DistributedDataParallel`` and ``torch.compile``.

    A model with adapters is the user's own, and is returned as it is.
    """
    while True:
        if isinstance(model, ModelWrapper):
            inner: nn.Module | None = model.unwrap()
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        else:
            inner = compiled_module(model)
        if inner is None:
            return model
        model = inner


def boosted_inside(model: nn.Module) -> nn.Module:
    """Return the boosted model that ``torch.compile`` was called on; ``model`` itself where it is anything else."""
    inner = compiled_module(model) if isinstance(model, nn.Module) else None
    return inner if isinstance(inner, ModelWrapper) else model
