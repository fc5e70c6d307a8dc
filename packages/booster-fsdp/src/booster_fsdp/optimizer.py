"""`FSDPOptimizer`: the user's optimizer over the DTensors of a sharded model, stepping on plain tensors; its state."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from booster_core.errors import ConfigError
from booster_core.gradients import clip_by_norm
from booster_core.plugin import OptimizerWrapper, rebind
from booster_core.ranks import NamedCall
from booster_core.state import MASTER, NamedTensors
from booster_fsdp.parameters import drop_reduced_gradients, gradient_of
from booster_fsdp.views import Views, WholeParameters
from booster_runtime.sharding import (
    AnyRankFlags,
    CouplingCheck,
    DTensorStateAdapter,
    is_by_matrix,
    local_of,
    may_couple,
    numbers_of_group,
    partition_for,
    whole_shard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from booster_core.ranks import DistCoordinator
    from booster_core.state import JSONValue, ParamGroup, TensorMeta, TensorShard
    from booster_fsdp.config import FSDPConfig
    from booster_fsdp.gradients import ShardedGradients
    from booster_runtime.sharding import ShardingRanks


def _of_model(name: str) -> Any:
    """Return a property that is an attribute of the optimizer inside, where that holds no views."""

    def get(wrapper: FSDPOptimizer) -> Any:
        wrapper.views.hide()
        return getattr(wrapper.optim, name)

    return property(get, lambda wrapper, value: setattr(wrapper.optim, name, value))


class FSDPOptimizer(OptimizerWrapper):
    """Step the user's optimizer on this rank's part of a sharded model.

    Its groups list the model's parameters, DTensors and replicated ones, and its state is sharded as they are. For an
    optimizer that needs whole parameters, the state of each parameter is on the rank that steps it.

    Args:
        optim: The user's optimizer, over the parameters that the model had before it was sharded.
        model: The user's model, sharded.
        before: The parameters before sharding, and their paths in the model, as for ``get_parameter``.
        gradients: Finishes the model's gradients, for all of its optimizers.
        ranks: The ranks of a replica.
        config: Options.
        device: Where the model runs.
        **kwargs: As for `OptimizerWrapper`.

    Raises:
        ConfigError: If the optimizer can't step on parts.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        *,
        before: Mapping[nn.Parameter, str],
        gradients: ShardedGradients,
        ranks: ShardingRanks,
        config: FSDPConfig,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(optim, **kwargs)
        self._takes_rows = partition_for(optim, config.partition) == "flat"
        is_unknown = ranks.shard_size > 1 and may_couple(optim, config.partition)
        self._coupling = CouplingCheck(optim, is_unknown=is_unknown, device=device)
        if config.cpu_offload and device.type != "cpu" and not self._takes_rows:
            msg = (
                f"{type(optim).__name__} needs whole parameters, which ranks exchange on '{device.type}', but "
                "`cpu_offload=True` keeps them in host memory. Use another optimizer, or leave out `cpu_offload`."
            )
            raise ConfigError(msg)
        self._model_parameters = list(model.parameters())
        self._names = NamedTensors.of(model).name_of
        self._sharded = gradients
        self.sends_settings = False
        gradients.scaling = self.scaling
        if self._context is not None:
            gradients.context = self._context
        self.ranks = ranks
        self._config = config
        self._device = device
        self._whole: list[WholeParameters] = []
        self._loads = [0] * ranks.shard_size
        self.views = Views(optim)
        self._held: list[nn.Parameter] = []
        now = {parameter: model.get_parameter(path) for parameter, path in before.items()}
        rebind(optim, {old: new for old, new in now.items() if old is not new})
        for group in optim.param_groups:
            self._adopt(group)

    # ---- parameters and groups

    # Asked for by schedulers, users and torch's tools: with the model's parameters, and DTensors as their state.
    param_groups: list[dict[str, Any]] = _of_model("param_groups")
    state: Any = _of_model("state")

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        is_own = getattr(found, "__self__", None) is self.optim and not hasattr(torch.optim.Optimizer, name)
        return functools.partial(self._call_own_method, found) if is_own else found

    def drawing_group(self) -> ProcessGroup | None:
        """Return the ranks that hold the same shards."""
        return self.ranks.replica_group

    def _call_own_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's optimizer that torch's have not, such as ``eval`` of schedule-free ones.

        It may write to the parameters, as a step does.

        Collective: every rank of the world, with the same arguments.
        """
        with NamedCall("method of the optimizer"):
            self.views.show()
            self.views.point_at_rows()
            for whole in self._whole:
                whole.gather(all_parameters=True)
            result = method(*args, **kwargs)
            self.views.drop_gradients()
            for whole in self._whole:
                whole.scatter()
            self._sharded.note_update()
        return result

    def unwrap(self) -> Optimizer:
        """Return the optimizer inside, with the model's parameters, and DTensors as their state."""
        self.views.hide()
        return super().unwrap()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside as this rank holds it; see `Booster.save_optimizer` for files."""
        self.views.hide()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside as this rank holds it; see `Booster.load_optimizer` for files."""
        self.views.hide()
        super().load_state_dict(state_dict)

    def _adopt(self, group: Mapping[str, Any]) -> None:
        """Prepare to step on a group's parameters."""
        self._held += group["params"]
        if self._takes_rows:
            for parameter in group["params"]:
                self.views.add_rows(parameter)
        else:
            whole = WholeParameters(group["params"], self.ranks, self._loads, by_matrix=is_by_matrix(self.unwrap()))
            self._whole.append(whole)
            self.views.add_whole(whole.wholes)

    def stepped_whole(self) -> list[nn.Parameter]:
        """Return the parameters that one rank of a replica steps whole, which alone has their state."""
        return [] if self._takes_rows else [each for each in self._held if isinstance(each, DTensor)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the inner optimizer.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already.

        Collective: none, but every rank must add the same group, between a step and the next backward.
        """
        self._sharded.reshard()
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        numbers = {id(parameter): number for number, parameter in enumerate(self._model_parameters)}
        names = {number: self._names[key] for key, number in numbers.items()}
        remedy = "Take it from the model that `boost` returned, outside of forward."
        held = {numbers[key] for each in self.scaling.optimizers for key in each.listed_parameters()}
        numbers_of_group(listed, numbers, held, names, remedy=remedy)
        self.views.hide()
        self.optim.add_param_group({**param_group, "params": listed})
        self._adopt(self.optim.param_groups[-1])

    # ---- gradients

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under ``no_sync`` only for the gathers of parameters.
        """
        self._sharded.has_backward = True
        self._sharded.recover()
        super().backward(loss, inputs, retain_graph=retain_graph)

    def check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Check that no sharded parameter of the model is among the tensors that backward is for.

        Raises:
            ConfigError: If one is: forward used a gathered copy of it, and nothing leads to the parameter itself.
        """
        super().check_inputs(inputs)
        sharded = {id(each) for each in self._model_parameters if isinstance(each, DTensor)}
        num_sharded = sum(id(each) in sharded for each in inputs)
        if num_sharded:
            msg = (
                f"`inputs` has {num_sharded} parameters of the model, and FSDP computes with gathered copies of them, "
                "so that they would get no gradient. Leave `inputs` out, freeze the other parameters before `boost`, "
                "or use a plugin such as 'zero'."
            )
            raise ConfigError(msg)

    def watch_gradients(self, note: Callable[..., None]) -> None:
        """Have a function called when backward has given the model a gradient: torch gives those of shards to units."""
        self._sharded.notes.append(note)
        for parameter in self._model_parameters:
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Reduce the gradients of ``no_sync``, and average those of replicated parameters.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self._sharded.settle()

    def gradients(self) -> list[Tensor]:
        """Return the averaged gradients of this rank's rows and of replicated parameters.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        held = [local_of(parameter.grad) for parameter in self.trained_parameters() if parameter.grad is not None]
        return [gradient for gradient in held if gradient.numel()]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are listed, and the model's others that are trained."""
        if not self.unlisted:
            return self._held
        held = {id(parameter) for parameter in self._held}
        return [*self._held, *(parameter for parameter in self.unlisted if id(parameter) not in held)]

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica; each element counts once."""
        optimizers = cast("list[FSDPOptimizer]", self.scaling.optimizers)
        gradients = [gradient for each in optimizers for gradient in each.gradients()]
        counted = [
            local_of(parameter.grad)
            for each in optimizers
            for parameter in each.trained_parameters()
            if parameter.grad is not None and (isinstance(parameter, DTensor) or self.ranks.shard_rank == 0)
        ]
        return clip_by_norm(
            gradients,
            max_norm,
            norm_type,
            counted=counted,
            groups=[] if self.ranks.shard_group is None else [self.ranks.shard_group],
            device=self._device,
            dtype=self.norm_dtype,
            error_if_nonfinite=error_if_nonfinite,
        )

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - as in core
        """Return whether a gradient overflowed on any rank.

        Collective: every rank of the world.
        """
        return any(AnyRankFlags(bytearray([overflow]), self._device).wait())

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, without loss scale; ``None`` if no rank used the parameter.

        Collective: every rank of the world.
        """
        self.settle()
        if parameter.grad is None:
            return None
        gradient: Tensor = parameter.grad.detach()
        if isinstance(gradient, DTensor):
            # The process group has no backend for offloaded shards.
            sharded: Any = gradient.to(self._device)
            gradient = sharded.full_tensor()
        scale = self.gradient_scale
        if scale is not None or gradient.data_ptr() == local_of(parameter.grad).data_ptr():
            gradient = gradient.clone()
        if scale is not None:
            gradient /= scale
        return gradient

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not.

        Collective: as `settle`, to zero them; else none.
        """
        if not set_to_none:  # which of them stay, is known then
            self.settle()
        trained = self.trained_parameters()
        is_alone = len(self.scaling.optimizers) == 1
        self._sharded.forget(None if is_alone else {id(parameter) for parameter in trained})
        # torch zeroes a group's gradients in one call, which takes no mixture of DTensors and others.
        kept = [] if set_to_none else [(parameter, gradient_of(parameter)) for parameter in trained]
        super().zero_grad(set_to_none=True)
        drop_reduced_gradients(trained)
        for parameter, gradient in kept:
            parameter.grad = gradient
            if gradient is not None:
                local_of(gradient).zero_()

    # ---- stepping

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's part; see `OptimizerWrapper.step`.

        Collective: every rank of the world.
        """
        if closure is None:
            self._clip_as_configured()
        return super().step(closure)

    def _clip_as_configured(self) -> None:
        if self._config.max_norm > 0 and self.scaling.norm is None:
            self.clip_grad_by_norm(self._config.max_norm)

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the inner optimizer on this rank's part, and broadcast the buffers that forward has changed.

        Raises:
            ConfigError: If a closure is passed with an optimizer that needs whole parameters.

        Collective: every rank of the world.
        """
        if closure is not None and not self._takes_rows:
            msg = (
                f"{type(self.unwrap()).__name__} gets whole parameters during a step, so a closure can't run the "
                "model. Call `step()` without a closure, or use plugin='ddp'."
            )
            raise ConfigError(msg)

        def evaluated() -> float:
            assert closure is not None
            loss = closure()
            self.settle()
            self._clip_as_configured()
            self._make_ready()
            return loss

        self.views.show()
        if closure is None:
            self._make_ready()
        run = self.optim.step if closure is None else functools.partial(self.optim.step, evaluated)
        result = self._coupling.run(run)
        self.views.drop_gradients()
        for whole in self._whole:
            whole.scatter()
        # Parameters that a forward without backward left gathered have old values.
        self._sharded.note_update()
        self._sharded.send_buffers()
        return result

    def _make_ready(self) -> None:
        self.settle()
        self.views.point_at_rows()
        for whole in self._whole:
            whole.gather()


class FSDPStateAdapter(DTensorStateAdapter):
    """List the shards of a sharded model and of its optimizer's state.

    Args:
        model: The boosted model.
        optimizers: Its optimizers, of which there may be none.
        coordinator: Provides the rank and the number of ranks.
        gradients: The model's; knows when shards have new values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[FSDPOptimizer],
        coordinator: DistCoordinator,
        gradients: ShardedGradients,
    ) -> None:
        self._gradients = gradients
        self._sharded = optimizers
        for each in optimizers:
            each.views.hide()
        super().__init__(model, optimizers, coordinator, prepare=gradients.reshard)

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        self._prepare()
        self._required_optimizers()
        parameters = NamedTensors.of(self._module).tensors
        whole = {id(parameter): each for each in self._sharded for parameter in each.stepped_whole()}
        of_all = []
        for name, state, tensor in self._state_tensors():
            optimizer = whole.get(id(parameters[name]))
            if state != MASTER and optimizer is not None:
                yield whole_shard(name, state, tensor, is_owner=optimizer.ranks.replica_rank == 0)
            else:
                of_all.append((name, state, tensor))
        yield from self._shards(of_all)

    @override
    def unsaved_state(self) -> Sequence[str]:
        with _showing(self._sharded):  # an optimizer inside of the optimizer keeps state of views
            return super().unsaved_state()

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        self._required_optimizers()
        names = {id(tensor): name for name, tensor in NamedTensors.of(self._module).tensors.items()}
        whole = {names[id(parameter)] for each in self._sharded for parameter in each.stepped_whole()}
        with _showing([each for each in self._sharded if each.stepped_whole()]):
            super().prepare_optimizer_load(tensors, scalars, groups)
        # Parameters that other ranks step take saved masters, too.
        listed = {name for group in groups for name in group.params}
        self._masters |= {name for name in whole & listed if MASTER in tensors.get(name, {})}

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        super().finish_load(model=model, optimizer=optimizer)
        self._gradients.note_update()

    @override
    def _name_of(self) -> Mapping[int, str]:
        names = dict(super()._name_of())
        views = {parameter: view for each in self._sharded for parameter, view in each.views.of.items()}
        return names | {id(view): names[id(parameter)] for parameter, view in views.items()}


@contextlib.contextmanager
def _showing(optimizers: Iterable[FSDPOptimizer]) -> Iterator[None]:
    """Let the optimizers inside hold views for the block of code."""
    for each in optimizers:
        each.views.show()
    try:
        yield
    finally:
        for each in optimizers:
            each.views.hide()
