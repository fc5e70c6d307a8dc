"""What `Booster.boost` returns in place of the user's model and optimizer.

`ModelWrapper` and `OptimizerWrapper` behave as what they wrap: attributes are forwarded, ``unwrap()`` gives the user's
own object back. A strategy subclasses them where its forward, backward or step differs.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster_core.errors import GradientError
from booster_core.gradients.clip import clip_by_norm, clip_by_value
from booster_core.gradients.norm import check_norm_arguments
from booster_core.plugin.originals import guard_forward, guard_step, through_door
from booster_core.precision.casting import cast_floating
from booster_core.precision.loss_scaler import DynamicLossScaler, any_nonfinite
from booster_core.ranks.progress import naming_missing_ranks
from booster_core.state.naming import compiled_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from booster_core.plugin.frozen import FrozenParameters
    from booster_core.precision.policy import PrecisionPolicy


class ModelWrapper(nn.Module):
    """A boosted model: runs the user's model in the run's precision, through the strategy's own forward.

    Args:
        module: What forward runs: the user's model, or a module of the strategy around it.
        original: The user's model; ``module`` itself where the strategy put nothing around it.
        precision: Precision of the run, applied by autocast where compute is narrower than the parameters; ``None``
            where the strategy applies it itself.

    ``state_dict``, ``load_state_dict`` and attributes are those of the user's model, under its own names. Methods other
    than ``forward`` (``generate``) run on the user's model directly. One that calls the model itself raises in training
    (`booster_core.plugin.originals`), because that forward would bypass the strategy.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a strategy's own forward run the user's model."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = through_door(cls.forward)  # type: ignore[method-assign]

    def __init__(
        self, module: nn.Module, original: nn.Module | None = None, *, precision: PrecisionPolicy | None = None
    ) -> None:
        super().__init__()
        self.module = module
        # Kept out of the module tree: registered a second time, every parameter would be listed twice.
        self.__dict__["_original"] = module if original is None else original
        self.__dict__["_door"] = guard_forward(self.__dict__["_original"])
        self.__dict__["_methods"] = _Methods()
        device = model_device(module)
        self._device_type = "cpu" if device is None else device.type
        self.precision = precision

    def unwrap(self) -> nn.Module:
        """Return the user's own model.

        Collective: none.
        """
        original: nn.Module = self.__dict__["_original"]
        return original

    @through_door
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; under autocast, floating outputs come back in the policy's ``output_dtype``.

        Collective: as the strategy's forward.
        """
        if torch.compiler.is_compiling():  # a clock is nothing to compile
            return self._forward(*args, **kwargs)
        with naming_missing_ranks("forward"):
            return self._forward(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's model in place, with the arguments of ``torch.compile``; the strategy's part is not.

        Collective: none.
        """
        self.unwrap().compile(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision is None or not self.precision.uses_autocast:
            return self.module(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=self.precision.compute_dtype):
            outputs = self.module(*args, **kwargs)
        return cast_floating(outputs, self.precision.output_dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's model as this rank holds it; see `Booster.save_model` for files."""
        return unwrap_model(self).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a state into the user's model as this rank holds it; see `Booster.load_model` for files."""
        return unwrap_model(self).load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank holds under their names in the user's model, as `state_dict` does."""
        return unwrap_model(self).named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under their names in the user's model."""
        return unwrap_model(self).named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:  # while copying or unpickling
                raise
        make = self.__dict__["_methods"].get(name)
        return getattr(self.unwrap(), name) if make is None else make(self)

    def replace_method(self, name: str, make: Callable[[ModelWrapper], Any]) -> None:
        """Let an attribute of the user's model be what ``make`` returns for this wrapper; copies are not affected.

        Collective: none.
        """
        self.__dict__["_methods"][name] = make


class _Methods(dict[str, Any]):
    """The replaced methods of one boosted model; a copy or pickle of the model has none."""

    def __reduce__(self) -> Any:
        return _Methods, ()


class OptimizerWrapper(Optimizer):
    """A boosted optimizer: a ``torch.optim.Optimizer`` to schedulers and to ``torch.amp``, that scales and clips.

    It shares ``param_groups``, ``state`` and ``defaults`` with the optimizer inside, so that a scheduler made before
    ``boost`` keeps steering it. Strategies with sharded state override `gradients`, `clip_gradients` and
    `overflow_anywhere`.

    Args:
        optim: The optimizer inside.
        precision: Precision of the run; decides on loss scaling.
        after_step: Called with this optimizer and the metrics of each step (``skipped``, ``grad_norm`` where it was
            computed, and ``loss_scale`` under fp16), where somebody listens.
    """

    frozen: FrozenParameters | None = None
    """The parameters that a step would pass over if they were unfrozen; `Booster.boost` tells."""

    def __init__(
        self,
        optim: Optimizer,
        *,
        precision: PrecisionPolicy | None = None,
        after_step: Callable[[Optimizer, dict[str, Any]], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called on purpose: it would build groups and state of its own, while
        # everything that it sets up is forwarded to the optimizer inside.
        self.optim = optim
        self._door = guard_step(optim)
        scaled = precision is not None and precision.loss_scale is not None
        self.loss_scaler = DynamicLossScaler(precision.loss_scale) if precision is not None and scaled else None
        self._after_step = after_step
        # Whether the gradients that are there have been divided by the loss scale.
        self.is_unscaled = False
        self._found_overflow = False
        self._grad_norm: Tensor | None = None

    def unwrap(self) -> Optimizer:
        """Return the optimizer inside.

        Collective: none.
        """
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim

    # ---- what schedulers, torch.amp and users read of an optimizer, shared with the one inside

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer inside, not a copy."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, not a copy."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the optimizer inside."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while copying or unpickling
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer inside.

        Collective: as the strategy's; none for replicated ones.
        """
        self.optim.add_param_group(param_group)

    def listed_parameters(self) -> set[int]:
        """Return the ids of the model's parameters that the groups list; strategies that step on others say which.

        Collective: none.
        """
        return {id(parameter) for group in self.param_groups for parameter in group["params"]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside as this rank holds it; see `Booster.save_optimizer` for files."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside as this rank holds it; see `Booster.load_optimizer` for files."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients.

        Collective: none.
        """
        self.is_unscaled = False
        self._found_overflow = False
        self.optim.zero_grad(set_to_none)

    # ---- backward, clipping and stepping

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss, scaled where the precision asks for it.

        Args:
            loss: A scalar with a gradient.
            inputs: As for ``Tensor.backward``: gradients go to these tensors only.
            retain_graph: Keep the graph for another backward.

        Raises:
            TypeError: If ``loss`` is not a tensor.
            GradientError: If ``loss`` is not a scalar or has no gradient.

        Collective: every data parallel rank, in step, outside of ``no_sync``.
        """
        check_loss(loss)
        if self.loss_scaler is not None:
            self._rescale_gradients()
            loss = loss.float() * self.loss_scaler.scale
        with naming_missing_ranks("backward"):
            loss.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that this rank holds and steps with."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield the gradients that this rank steps with; some at a time, for strategies that don't have all at hand."""
        yield self.gradients()

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
    ) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``, and return the norm before that.

        Args:
            max_norm: Largest global norm; 0 or more.
            norm_type: Order of the norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: Raise where the norm is infinite or NaN. An overflow under a dynamic loss scale is not
                an error: that step is skipped.

        Returns:
            A scalar tensor, the same on every rank: the norm over all parameters of the model, each counted once.

        Raises:
            ConfigError: If ``max_norm`` is negative or ``norm_type`` is not positive.
            GradientError: If the norm is not finite and ``error_if_nonfinite`` is set.

        Collective: every rank of the strategy's mesh, in step; none for replicated strategies.
        """
        check_norm_arguments(max_norm, norm_type)
        with naming_missing_ranks("clip_grad_by_norm"):
            self.unscale_gradients()
            forbids = error_if_nonfinite and not self._found_overflow
            self._grad_norm = self.clip_gradients(max_norm, norm_type, error_if_nonfinite=forbids)
        return self._grad_norm

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the unscaled gradients by their global norm; sharded strategies name their groups here."""
        return clip_by_norm(self.gradients(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ``[-clip_value, clip_value]``.

        Raises:
            ConfigError: If ``clip_value`` is negative.

        Collective: as `unscale_gradients`.
        """
        self.unscale_gradients()
        for gradients in self.gradients_in_parts():
            clip_by_value(gradients, clip_value)

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale, once a step, and note whether one overflowed on any rank.

        Collective: every rank of the strategy's mesh for sharded strategies; none for replicated ones.
        """
        if self.loss_scaler is None or self.is_unscaled:
            return
        overflows = []
        for gradients in self.gradients_in_parts():
            overflows.append(any_nonfinite(gradients))
            for gradient in gradients:
                gradient.div_(self.loss_scaler.scale)
        self._found_overflow = self.overflow_anywhere(any(overflows))
        self.is_unscaled = True

    def _rescale_gradients(self) -> None:
        """Multiply unscaled gradients that are still there by the loss scale, so that backward may add to them."""
        if self.loss_scaler is not None and self.is_unscaled:
            for gradients in self.gradients_in_parts():
                for gradient in gradients:
                    gradient.mul_(self.loss_scaler.scale)
        self.is_unscaled = False
        self._found_overflow = False

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - a flag is all there is to pass
        """Return whether a gradient overflowed on any rank; replicated gradients are equal everywhere."""
        return overflow

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters; under a dynamic loss scale, skip the update where a gradient overflowed.

        Args:
            closure: Re-evaluates the model, for optimizers that need it; not possible under a loss scale.

        Returns:
            What the optimizer inside returned.

        Raises:
            GradientError: If a closure is passed under a dynamic loss scale, or a parameter that was frozen at
                ``boost`` would not be trained.

        Collective: every rank of the strategy's mesh, in step.
        """
        if self.frozen is not None:
            self.frozen.check(self)
        if closure is not None and self.loss_scaler is not None:
            msg = "An optimizer that needs a closure can't run under fp16's dynamic loss scale. Use 'bf16' or 'fp32'."
            raise GradientError(msg)
        with naming_missing_ranks("step"):
            self.unscale_gradients()
            result = None if self._found_overflow else self._update(closure)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=self._found_overflow)
        if self._after_step is not None:
            self._after_step(self, self._metrics())
        self._grad_norm = None
        return result

    def _update(self, closure: Callable[[], float] | None) -> Any:
        """Update the parameters; meanwhile alone the optimizer inside may step."""
        before = self._door.is_open
        self._door.is_open = True
        try:
            return self.update_parameters(closure)
        finally:
            self._door.is_open = before

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside; sharded strategies make gradients ready before and share parameters after."""
        return self.optim.step(closure) if closure is not None else self.optim.step()

    def _metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"skipped": self._found_overflow}
        if self._grad_norm is not None:
            metrics["grad_norm"] = self._grad_norm
        if self.loss_scaler is not None:
            metrics["loss_scale"] = self.loss_scaler.scale
        return metrics


def check_loss(loss: Any) -> None:
    """Check that a loss can be run backward from.

    Raises:
        TypeError: If it is not a tensor.
        GradientError: If it is not a scalar, or has no gradient.

    Collective: none.
    """
    if not isinstance(loss, torch.Tensor):
        msg = f"`backward` needs a scalar tensor; got `{type(loss).__name__}`. With transformers, pass `outputs.loss`."
        raise TypeError(msg)
    if loss.numel() != 1:
        msg = (
            f"`backward` needs a scalar loss; this one has shape {tuple(loss.shape)}. "
            "Reduce it in the criterion, for example with `.mean()`."
        )
        raise GradientError(msg)
    if not loss.requires_grad:
        msg = (
            "The loss has no gradient: nothing that it was computed from requires one. Compute it from the boosted "
            "model's output, outside of `torch.no_grad()`, without `.detach()` or `.item()`."
        )
        raise GradientError(msg)


def unscaled_gradient(parameter: nn.Parameter, optimizer: Optimizer | None) -> Tensor | None:
    """Return a copy of a parameter's gradient with the optimizer's loss scale taken out; ``None`` where it has none.

    Collective: none.
    """
    if parameter.grad is None:
        return None
    if isinstance(optimizer, OptimizerWrapper) and optimizer.loss_scaler is not None and not optimizer.is_unscaled:
        return parameter.grad.detach() / optimizer.loss_scaler.scale
    return parameter.grad.detach().clone()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module: below our wrappers, ``DistributedDataParallel`` and ``torch.compile``.

    A model with adapters is the user's own, and is returned as it is.

    Collective: none.
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
    """Return the boosted model that ``torch.compile`` was called on; ``model`` itself where it is anything else.

    Collective: none.
    """
    inner = compiled_module(model) if isinstance(model, nn.Module) else None
    return inner if isinstance(inner, ModelWrapper) else model


def model_device(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter or buffer; ``None`` where it has neither."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return None if first is None else first.device
