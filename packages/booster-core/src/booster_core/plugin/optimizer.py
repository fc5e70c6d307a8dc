"""What `Booster.boost` returns in place of the user's optimizer.

An `OptimizerWrapper` behaves as the optimizer inside: attributes are forwarded, and ``unwrap()`` returns the user's own
object. A strategy subclasses it where its backward or step differs.
"""

from __future__ import annotations

import contextlib
import math
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from booster_core.errors import CheckpointError, ConfigError, GradientError
from booster_core.gradients import check_norm_arguments, clip_by_norm, clip_by_value, scale_by_norm
from booster_core.plugin.guards import guard_step, share_zero_grad, zero_grad_inside
from booster_core.plugin.interface import as_tuple
from booster_core.plugin.scaling import GradientScaling
from booster_core.plugin.step_agreement import StepDraws
from booster_core.precision.loss_scaler import any_raised, unscale
from booster_core.ranks.calls import NamedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from booster_core.plugin.interface import BoostContext
    from booster_core.precision.loss_scaler import DynamicLossScaler


_PART = "booster_part"
"""In a state dict: whose part of the optimizer's state it is."""


class PartialState(dict[str, Any]):
    """What one rank holds of an optimizer's state; an optimizer that is not boosted refuses to load it.

    Every optimizer of torch copies what it loads, and would take a part for the whole.
    """

    def copy(self) -> NoReturn:
        """Refuse to be loaded by an optimizer of the whole model.

        Raises:
            CheckpointError: Always.
        """
        msg = (
            f"This optimizer's state is {_described(self[_PART])}, and an optimizer of the whole model would take it "
            "for its own. Save by `booster.save_optimizer` on every rank, and load by `load_optimizer`, with "
            "`Booster()` also in one process."
        )
        raise CheckpointError(msg)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what makes it again, of ``torch.load`` as well."""
        del protocol
        return PartialState, (dict(self),)


torch.serialization.add_safe_globals([PartialState])


def _described(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "whole"
    return f"that of rank {part['rank']} of {part['world_size']} under plugin '{part['plugin']}'"


def _shared(name: str) -> Any:
    """Return a property that is an attribute of the optimizer inside, not a copy."""

    def get(wrapper: OptimizerWrapper) -> Any:
        return getattr(wrapper.optim, name)

    def change(wrapper: OptimizerWrapper, value: Any) -> None:
        setattr(wrapper.optim, name, value)

    return property(get, change, doc=f"The ``{name}`` of the optimizer inside, not a copy.")


class OptimizerWrapper(Optimizer):
    """A boosted optimizer: a ``torch.optim.Optimizer`` to schedulers and to ``torch.amp``, that scales and clips.

    It shares ``param_groups``, ``state`` and ``defaults`` with the optimizer inside, so that a scheduler made before
    ``boost`` keeps steering it. It steps on the parameters that its groups list; its gradients, which it scales, clips
    and drops, are those of all trained parameters of the model. Strategies with sharded state override `gradients`,
    `clip_gradients` and `overflow_anywhere`.

    Args:
        optim: The optimizer inside.
        context: Of the ``boost``: its precision decides on loss scaling, its hooks hear of each step.
        scaling: What the optimizers of a model share; one of its own by default, for a model with one optimizer.

    Attributes:
        norm_dtype: Format of the global norm; ``None`` takes that of the gradients, as `global_norm` says.
        unlisted: Trained parameters of the model that no group of any optimizer listed at `boost`; of several
            optimizers, the first one has them.
    """

    refuses_step: str | None = None
    """Why a step now would be wrong, such as before the last micro-batch of an accumulation window."""
    num_steps: int = 0
    """Number of steps so far, those that an overflow skipped included."""

    sends_settings: bool = True
    """Whether `step` compares the settings of groups between ranks by an exchange of its own; see `GroupSettings`."""

    frozen: Any = None
    """Its ``check(optimizer)``, before each step, raises where a parameter was unfrozen that it would leave out."""

    def __init__(
        self,
        optim: Optimizer,
        *,
        context: BoostContext | None = None,
        scaling: GradientScaling | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make groups and state of its own.
        self.optim = optim
        self._guard = guard_step(optim)
        share_zero_grad(optim, self)
        self._context = context
        self.scaling = GradientScaling(None if context is None else context.precision) if scaling is None else scaling
        self.scaling.add(self)
        self.on_step: list[Callable[[OptimizerWrapper, dict[str, Any]], None]] = []
        """Called with this optimizer and the metrics after each step, in their order; copies have none."""
        # Whether the gradients that are there have been divided by the loss scale.
        self.is_unscaled = False
        # Whether a backward has multiplied a loss since this optimizer dropped its gradients: those that a script
        # assigns before one have no loss scale.
        self.is_scaled = False
        self.norm_dtype: torch.dtype | None = None
        self.before_step: list[Callable[[OptimizerWrapper], bool]] = []
        """Called with this optimizer before each update, on unscaled gradients; the step is left out where one says so,
        which it must on every rank or on none."""
        self._step_draws = StepDraws()
        # torch's own optimizers draw no random numbers. Asked once: some strategies' `unwrap` does work.
        self._may_draw = not type(OptimizerWrapper.unwrap(self)).__module__.startswith("torch.optim")
        self.unlisted: list[nn.Parameter] = []
        self.compared_parameters: Mapping[str, nn.Parameter] = {}
        """The model's parameters, of which all ranks must train the same; a copy of the optimizer knows none."""
        self.model_modules: Callable[[], Iterable[nn.Module]] = tuple
        """Returns the modules of the model, which `boost` tells; a copy of the optimizer knows none."""

    def set_model(self, model: nn.Module, norm_dtype: torch.dtype) -> None:
        """Learn of the model's trained parameters, as the strategy has laid them out, and buffers; `boost` calls it.

        Args:
            model: The user's own model.
            norm_dtype: Format of the global norm.
        """
        self.norm_dtype = norm_dtype
        self.compared_parameters = dict(model.named_parameters())
        self.model_modules = model.modules
        if self is self.scaling.optimizers[0]:
            self.unlisted = self.find_unlisted(model)

    def find_unlisted(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the trained parameters of the model that no group of any optimizer lists."""
        listed = set().union(*(each.listed_parameters() for each in self.scaling.optimizers))
        return [each for each in model.parameters() if each.requires_grad and id(each) not in listed]

    @property
    def loss_scaler(self) -> DynamicLossScaler | None:
        """The dynamic loss scale, under fp16; the same of all optimizers of a model."""
        return self.scaling.factors.scaler

    @property
    def gradient_scale(self) -> float | None:
        """By what the present gradients are multiplied, until they are unscaled; ``None`` for nothing."""
        return self.scaling.factors.scale if self.is_scaled and not self.is_unscaled else None

    @property
    def found_overflow(self) -> bool:
        """Whether the model's gradients overflowed; after a step, whether it was skipped."""
        return self.scaling.found_overflow

    def unwrap(self) -> Optimizer:
        """Return the optimizer inside."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim

    # Read and set by schedulers, torch.amp and users.
    param_groups: list[dict[str, Any]] = _shared("param_groups")
    state: Any = _shared("state")
    defaults: dict[str, Any] = _shared("defaults")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while copying or unpickling
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        own = {"on_step": [], "before_step": [], "model_modules": tuple, "compared_parameters": {}}
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.scaling.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer inside.

        Collective: as the strategy's; none for replicated ones.
        """
        self.optim.add_param_group(param_group)

    def listed_parameters(self) -> set[int]:
        """Return the ids of the model's parameters that the groups list; strategies that step on others say which."""
        return {id(parameter) for group in self.param_groups for parameter in group["params"]}

    def stepped(self) -> list[nn.Parameter]:
        """Return what the optimizer inside steps on; strategies with parts of parameters say which."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside as this rank holds it; see `Booster.save_optimizer` for files.

        Where that is a part of the state, it says whose.
        """
        part = self._part()
        state = self.optim.state_dict()
        return state if part is None else PartialState(state | {_PART: part})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside as this rank holds it; see `Booster.load_optimizer` for files.

        Raises:
            CheckpointError: If it is of another rank, number of ranks or plugin, of which each rank holds a part.
        """
        found, part = state_dict.get(_PART), self._part()
        # torch's `set_optimizer_state_dict` brings DTensors that are cut for this rank, and drops what says so.
        listed = chain.from_iterable(group["params"] for group in self.param_groups)
        is_cut = found is None and any(hasattr(each, "placements") for each in listed)
        if found != part and not is_cut:
            msg = (
                f"This optimizer's state is {_described(found)}, and here it is {_described(part)}: torch would load "
                "it in the wrong places. Save by `booster.save_optimizer` or `save_checkpoint`, and load by "
                "`load_optimizer` or `load_checkpoint`, on every rank."
            )
            raise CheckpointError(msg)
        self.optim.load_state_dict(dict(state_dict))

    def _part(self) -> dict[str, Any] | None:
        """Return whose part of the state this rank holds; ``None`` where it holds all of it."""
        from booster_core.state import ReplicatedStateAdapter

        booster = None if self._context is None else self._context.booster
        if booster is None or booster.context.coordinator.world_size == 1:
            return None
        model = next((each for each in booster.boosted_models if self in each.boosted_optimizers), None)
        if model is None or type(booster.state_adapter(model)) is ReplicatedStateAdapter:
            return None
        coordinator = booster.context.coordinator
        return {"plugin": booster.plugin.name, "rank": coordinator.rank, "world_size": coordinator.world_size}

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients of the model."""
        self.is_unscaled = self.is_scaled = False
        self.scaling.forget(self)
        zero_grad_inside(self.optim, set_to_none=set_to_none)
        for parameter in self.unlisted:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss, scaled where the precision asks for it, and weighed as the blocks around say.

        Args:
            loss: A scalar with a gradient.
            inputs: As for ``Tensor.backward``: gradients go to these tensors only.
            retain_graph: Keep the graph for another backward.

        Raises:
            TypeError: If ``loss`` is not a tensor.
            ConfigError: If the strategy can't give gradients to these ``inputs`` only.
            GradientError: If ``loss`` is not a scalar or has no gradient.

        Collective: every data parallel rank, in step, outside of ``no_sync``.
        """
        check_loss(loss)
        if inputs is not None:
            inputs = (inputs,) if isinstance(inputs, (torch.Tensor, GradientEdge)) else tuple(inputs)
            self.check_inputs(inputs)
        if self.scaling.replicas is not None:
            self.scaling.replicas.forget()
        factors = self.scaling.factors
        with NamedCall("backward"), factors.backward([self.scaling]) as running:
            if running.weight != 1:
                loss = loss * running.weight
            if factors.scale is not None:
                loss = loss.float() * factors.scale
            loss.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Check that `backward` can give gradients to some tensors only; strategies add what they can't do.

        Raises:
            ConfigError: If it can't.
        """
        if self.loss_scaler is None:
            return
        stepped = self.listed_parameters()
        num_others = sum(id(each) not in stepped for each in inputs)
        if num_others:
            msg = (
                f"`inputs` has {num_others} tensor(s) that the optimizer does not step, whose gradients would keep the "
                "loss scale of fp16. Use `torch.autograd.grad(loss, inputs)` for them, or train in 'bf16' or 'fp32'."
            )
            raise ConfigError(msg)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that this rank holds of the parameters listed here, and of those that none lists."""
        return [p.grad for p in self.trained_parameters() if p.grad is not None]

    def gradient_layout(self) -> Any:
        """Return what each of the `gradients` is of, as JSON; equal where those of two runs can be averaged.

        Collective: as `gradients`.
        """
        self.gradients()  # where a strategy averages them
        return [index for index, p in enumerate(self.trained_parameters()) if p.grad is not None]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are listed here, and the model's others that are trained and that none lists."""
        listed = {id(p): p for group in self.param_groups for p in group["params"]}
        return [*listed.values(), *(p for p in self.unlisted if id(p) not in listed)]

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of the model that this rank holds, some at a time where it does not hold all at once."""
        yield self.gradients()

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
    ) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``, and return the norm before that.

        Under every plugin, these are the gradients of all trained parameters of the model, also of those that no group
        lists, as for ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``.

        Args:
            max_norm: Largest global norm; 0 or more. Infinity changes no gradient.
            norm_type: Order of the norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: Raise where the norm is infinite or NaN. An overflow under a dynamic loss scale is not
                an error: that step is skipped.

        Returns:
            A scalar tensor, the same on every rank: the norm over all trained parameters of the model, each counted
            once. In fp64 where some of these are, else in fp32.

        Raises:
            ConfigError: If ``max_norm`` is negative or ``norm_type`` is not positive.
            GradientError: If the norm is not finite and ``error_if_nonfinite`` is set.

        Collective: every rank of the strategy's mesh, in step; none for replicated strategies.
        """
        check_norm_arguments(max_norm, norm_type)
        with NamedCall("clip_grad_by_norm"):
            self.unscale_gradients()
            forbids = error_if_nonfinite and not self.found_overflow
            norm = self.scaling.norm = self.clip_gradients(max_norm, norm_type, error_if_nonfinite=forbids)
        return norm

    def scale_to_norm(self, norm: Tensor, max_norm: float) -> None:
        """Scale the unscaled gradients of the model as clipping does, by a norm that counts those of others too.

        Args:
            norm: The joint norm, which is recorded as this model's.
            max_norm: Largest joint norm.
        """
        self.scaling.norm = norm
        if max_norm == math.inf:
            return
        for optimizer in self.scaling.optimizers:
            for gradients in optimizer.gradients_in_parts():
                scale_by_norm(gradients, norm, max_norm)

    def grad_norm(self) -> Tensor:
        """Return the global norm of the present step's gradients before clipping, and change none of them.

        It is that of `clip_grad_by_norm` where the step's gradients were clipped, of any order; else it is computed,
        once a step.

        Returns:
            As `clip_grad_by_norm`.

        Collective: as `clip_grad_by_norm`.
        """
        norm = self.scaling.norm
        return self.clip_grad_by_norm(math.inf) if norm is None else norm

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the unscaled gradients by their global norm; sharded strategies name their groups here."""
        gradients = [each for optimizer in self.scaling.optimizers for each in optimizer.gradients()]
        return clip_by_norm(
            gradients, max_norm, norm_type, dtype=self.norm_dtype, error_if_nonfinite=error_if_nonfinite
        )

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to ``[-clip_value, clip_value]``; of those of `clip_grad_by_norm`.

        Raises:
            ConfigError: If ``clip_value`` is negative.

        Collective: as `unscale_gradients`.
        """
        self.unscale_gradients()
        for optimizer in self.scaling.optimizers:
            for gradients in optimizer.gradients_in_parts():
                clip_by_value(gradients, clip_value)

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale, once a step, and note whether one overflowed on any rank.

        Before that, they are averaged with those of other copies of the run, where there are some. Those of other
        models that share the loss are divided too, because their steps are skipped together.

        Raises:
            GradientError: If some came of a backward that did not multiply its loss as it should have.

        Collective: every rank of the strategy's mesh for sharded strategies, and with other copies; else none.
        """
        together = self.scaling.together
        for each in together:
            each.check()
        for each in together:
            if each.replicas is not None:
                each.replicas.average()
            for optimizer in each.optimizers:
                optimizer._unscale_own_gradients()  # noqa: SLF001 - of the same class
        if any(each.found_overflow for each in together):
            for each in together:
                each.found_overflow = True

    def _unscale_own_gradients(self) -> None:
        """Divide the gradients that this optimizer steps with by the loss scale, unless they are."""
        scale = self.gradient_scale
        if scale is None:
            return
        flags = [flag for gradients in self.gradients_in_parts() for flag in unscale(gradients, scale)]
        self.scaling.found_overflow |= self.overflow_anywhere(any_raised(flags))
        self.is_unscaled = True

    def rescale_gradients(self, factor: float) -> None:
        """Multiply the gradients that are there, so that a backward with another loss scale may add to them.

        Collective: as `gradients`, unless the factor is 1.
        """
        if factor != 1:
            for gradients in self.gradients_in_parts():
                if gradients:
                    torch._foreach_mul_(gradients, factor)
        self.is_unscaled = False

    def watch_gradients(self, note: Callable[..., None]) -> None:
        """Have a function called when backward has given the model a gradient, on each rank that gets one.

        Strategies under which backward gives gradients to other tensors than the model's parameters say so.
        """
        held = {id(each): each for module in self.model_modules() for each in module.parameters(recurse=False)}
        for parameter in held.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - a flag is all there is to pass
        """Return whether a gradient overflowed on any rank; replicated gradients are equal everywhere."""
        return overflow

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters; under a dynamic loss scale, skip the update where a gradient overflowed.

        A step that other copies of the run do not commit changes nothing, and drops the gradients.

        Args:
            closure: Re-evaluates the model, for optimizers that need it; not possible under a loss scale.

        Returns:
            What the optimizer inside returned.

        Raises:
            GradientError: If a closure is passed under a dynamic loss scale or with other copies of the run, or a
                parameter that was frozen at ``boost`` would not be trained.

        Collective: every rank of the strategy's mesh, in step.
        """
        self._check_step(closure)
        if self.sends_settings and self._context is not None:
            self.scaling.settings.exchange(self.scaling.groups, self.compared_parameters, self._context)
        replicas = self.scaling.replicas
        with NamedCall("step"):
            self.unscale_gradients()
            is_lost = replicas is not None and not replicas.commits()
            refusals = [] if is_lost else [refuses(self) for refuses in tuple(self.before_step)]
            is_left_out = is_lost or any(refusals)
            result = None if is_left_out or self.found_overflow else self._update(closure)
        self.num_steps += 1
        norm = self.scaling.norm
        if is_lost:
            self.scaling.norm = None
            self.zero_grad()
        else:
            self.scaling.note_step(self)
        metrics = self._metrics(norm, is_left_out=is_left_out)
        for observe in tuple(self.on_step):
            observe(self, metrics)
        if self._context is not None and self._context.hooks.after_step.get_hookimpls():  # may be registered late
            self._context.hooks.after_step(optimizer=self, metrics=metrics)
        return result

    def _update(self, closure: Callable[[], float] | None) -> Any:
        """Update the parameters; only meanwhile may the optimizer inside step."""
        before = self._guard.is_open
        self._guard.is_open = True
        try:
            with self._drawing_alike(has_closure=closure is not None):
                return self.update_parameters(closure)
        finally:
            self._guard.is_open = before

    def _drawing_alike(self, *, has_closure: bool) -> AbstractContextManager[None]:
        """Return a context of a step in which ranks that step on the same values draw the same random numbers."""
        # The forward of a closure is to draw each rank's numbers.
        if not self._may_draw or has_closure or self._context is None or (group := self.drawing_group()) is None:
            return contextlib.nullcontext()
        return self._step_draws.alike(group, self._context)

    def drawing_group(self) -> ProcessGroup | None:
        """Return the ranks that step on the same values, for optimizers that draw random numbers in a step.

        ``None``, the default, where there are no others; strategies that keep replicas say which.
        """
        return None

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside; sharded strategies make gradients ready before and share parameters after."""
        return self.optim.step(closure) if closure is not None else self.optim.step()

    def _check_step(self, closure: Callable[[], float] | None) -> None:
        """Raise where a step now would be wrong, or a closure can't be followed."""
        if self.refuses_step is not None:
            raise GradientError(self.refuses_step)
        self.scaling.check()
        if self.frozen is not None:
            self.frozen.check(self)
        if closure is None:
            return
        if self.loss_scaler is not None:
            msg = "An optimizer that needs a closure can't run under fp16's dynamic loss scale. Use 'bf16' or 'fp32'."
            raise GradientError(msg)
        if self.scaling.replicas is not None:
            msg = "An optimizer that needs a closure can't run in several replica groups. Use one that needs none."
            raise GradientError(msg)
        if self.before_step:
            msg = "An optimizer that needs a closure makes its gradients in the step, which nothing can look at before."
            raise GradientError(msg)

    def _metrics(self, norm: Tensor | None, *, is_left_out: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = {"skipped": is_left_out or self.found_overflow}
        if norm is not None:
            metrics["grad_norm"] = norm
        if self.loss_scaler is not None:
            metrics["loss_scale"] = self.loss_scaler.scale
        return metrics


def check_loss(loss: Any) -> None:
    """Check that a loss can be run backward from.

    Raises:
        TypeError: If it is not a tensor.
        GradientError: If it is not a scalar, or has no gradient.
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


def unscaled_gradient(parameter: nn.Parameter, optimizer: Optimizer | Sequence[Optimizer] | None) -> Tensor | None:
    """Return a copy of a parameter's gradient with the loss scale taken out; ``None`` where it has none.

    Args:
        parameter: The parameter.
        optimizer: The boosted optimizer, or all of the model.
    """
    if parameter.grad is None:
        return None
    scale = _scale_of(parameter, optimizer)
    return parameter.grad.detach().clone() if scale is None else parameter.grad.detach() / scale


def write_gradient(gradient: Tensor, values: Tensor, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
    """Copy values into a gradient, with the loss scale that the optimizer will take out.

    Args:
        gradient: A whole gradient, or a part of one.
        values: In its shape, without loss scale.
        optimizer: The boosted optimizer, or all of the model.
    """
    scale = _scale_of(gradient, optimizer)
    with torch.no_grad():
        gradient.copy_(values if scale is None else values * scale)


def _scale_of(tensor: Tensor, optimizer: Optimizer | Sequence[Optimizer] | None) -> float | None:
    """Return the loss scale of a parameter's present gradient; ``None`` where it has none."""
    boosted = [each for each in as_tuple(optimizer) if isinstance(each, OptimizerWrapper)]
    holds = [each for each in boosted if id(tensor) in each.listed_parameters()] or boosted[:1]
    return holds[0].gradient_scale if holds else None
