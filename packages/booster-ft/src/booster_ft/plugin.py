"""`FaultTolerantPlugin`: replica groups around any other plugin, which survive each other."""

from __future__ import annotations

import copy
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin import Boosted, Capability, PipelinePlugin, Plugin, as_tuple, load, unwrap_model
from booster_core.state import ReplicatedStateAdapter
from booster_ft.config import FaultToleranceConfig, require_torchft
from booster_ft.state import GroupState
from booster_runtime.data import compare_splits, shard_dataloader
from booster_runtime.strategy import STRATEGY_TRAINING, config_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, ModelWrapper, OptimizerWrapper
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter
    from booster_ft.groups import ReplicaGroups


_OF_ONE_GROUP = ("replica_id", "lighthouse", "timeout_seconds", "quorum_timeout_seconds")
"""The options that may be others in each group."""


class FaultTolerantPlugin(PipelinePlugin):
    """Train in replica groups, each launched by itself, that average gradients and survive each other.

    `FaultToleranceConfig` documents the other keywords of the signature.

    Args:
        inner: The plugin inside of each group, by name or as an object.
        inner_options: Keywords of the inner plugin, where it is given by name.
        outer_optimizer: With ``sync_every``: makes an optimizer of the parameters that steps with the average change
            since the last synchronization (DiLoCo), such as
            ``lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)``.
        precision: Of the inner plugin; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If torchft can't be imported, a value is out of range, or the inner plugin can't be used.

    Memory per rank and step: that of the inner plugin; while a group comes back, a copy of its state on the host.
    Communication per rank and step: that of the inner plugin, and an all-reduce of its gradients over the groups.
    Reference: https://github.com/pytorch/torchft; Douillard et al. 2023, "DiLoCo" (arXiv:2311.08105).
    """

    name: ClassVar[str] = "ft"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING | {Capability.DATA_PARALLEL}

    def __init__(
        self,
        *,
        inner: str | Plugin = "ddp",
        inner_options: Mapping[str, Any] | None = None,
        min_replicas: int = 1,
        spares: bool = False,
        replica_id: int | None = None,
        num_replicas: int | None = None,
        lighthouse: str | None = None,
        timeout_seconds: float = 60.0,
        quorum_timeout_seconds: float = 600.0,
        sync_every: int | None = None,
        outer_optimizer: Callable[[Any], Optimizer] | None = None,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        require_torchft()
        self.config = config_of(FaultToleranceConfig, locals())
        if outer_optimizer is not None and sync_every is None:
            msg = "`outer_optimizer` steps when groups synchronize parameters. Say how often, by `sync_every=100`."
            raise ConfigError(msg)
        self.outer_optimizer = outer_optimizer
        self.inner = _inner_plugin(inner, inner_options, precision)
        self.precision = self.inner.precision
        # What one object can do is what its inner plugin can do, and does.
        vars(self)["capabilities"] = self.inner.capabilities - {Capability.SEVERAL_OPTIMIZERS}
        others = vars(Plugin).keys() - vars(FaultTolerantPlugin).keys()
        vars(self).update({name: getattr(self.inner, name) for name in others if not name.startswith("_")})
        # To those who split samples, ranks are counted over all groups, present or not.
        self._everyone = copy.copy(self.inner)
        vars(self._everyone)["data_parallel_coordinates"] = self._place_among_all
        vars(self)["prepare_dataloader"] = self._everyone.prepare_dataloader
        self._groups: ReplicaGroups | None = None

    @property
    def groups(self) -> ReplicaGroups:
        """This group among the others, once a model is boosted with its optimizer."""
        if self._groups is None:
            msg = "The replica groups are known once a model is boosted with its optimizer."
            raise ConfigError(msg)
        return self._groups

    @property
    def step(self) -> int:
        """Number of steps that the run has committed, whichever groups took part."""
        return 0 if self._groups is None else self._groups.step

    def check_objects(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse what can't be averaged between groups, and what the inner plugin refuses."""
        assert context.meeting is not None, "`boost` passes its own"
        compare_splits(objects.dataloader, self._everyone, context, context.meeting)
        self.inner.check_objects(objects._replace(dataloader=None), context)
        if objects.optimizer is None:
            return
        if self._groups is not None:
            msg = "Plugin 'ft' trains one model in a run, and one is boosted. Boost others without an optimizer."
            raise ConfigError(msg)
        for name, module in objects.model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                msg = f"The gradients of '{name}' are sparse, and not averaged between groups. Pass `sparse=False`."
                raise ConfigError(msg)
        for name, parameter in objects.model.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                msg = f"'{name}' is complex, and is not averaged between replica groups. Store its real view."
                raise ConfigError(msg)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Split loaders between all ranks of all groups, let the inner plugin configure, and join its optimizer.

        Collective: every rank of the group.
        """
        from booster_ft.groups import ReplicaGroups  # which needs torchft

        loaders = shard_dataloader(objects.dataloader, self._everyone, context)
        boosted = self.inner.configure(objects._replace(dataloader=loaders), context)
        if objects.optimizer is None:
            return boosted
        model: Any = boosted.model
        (optimizer,) = boosted.optimizers
        state = GroupState(
            partial(self.inner.state_adapter, model, context),
            optimizer.loss_scaler,
            as_tuple(objects.lr_scheduler),
            as_tuple(loaders),
            context.coordinator,
            self.config.place[0],
        )
        options = [(name, repr(value)) for name, value in self.agreed_options().items() if name not in _OF_ONE_GROUP]
        facts = repr((options, context.coordinator.world_size, context.precision.describe()))
        self._groups = groups = ReplicaGroups(optimizer, self.config, state, context, facts)
        begin = groups.begin
        if self.config.sync_every is None:
            optimizer.scaling.replicas = groups
        else:
            _check_steps_on_parameters(model, optimizer, state.adapter())
            begin = cache(partial(groups.step_apart, model, self.outer_optimizer))
        model.register_forward_pre_hook(lambda *_: begin() if torch.is_grad_enabled() else None)
        for loader in as_tuple(loaders):
            if hasattr(loader, "before_pass"):
                loader.before_pass = begin
        return boosted

    def _place_among_all(self, coordinator: DistCoordinator) -> tuple[int, int]:
        """Return the index of this rank among all that see different samples, in any group, and their number."""
        index, size = self.inner.data_parallel_coordinates(coordinator)
        replica_id, num_replicas = self.config.place
        return replica_id * size + index, num_replicas * size

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return a parameter's gradient, averaged over ranks and groups."""
        if self._groups is not None and self.config.sync_every is None and model.boosted_optimizers:
            self._groups.average()
        return self.inner.full_gradient(model, name)

    def what_to_plan(self) -> str:
        """Return what `booster plan` can run: what a group does without the others."""
        return f"its inner plugin '{self.inner.name}'"

    def describe(self) -> Mapping[str, object]:
        """Return the options of both plugins and their values."""
        return self._options(self.inner.describe())

    def agreed_options(self) -> Mapping[str, object]:
        return self._options(self.inner.agreed_options())

    def _options(self, inner: Mapping[str, object]) -> dict[str, object]:
        return {
            "inner": self.inner.name,
            **asdict(self.config),
            **{f"inner.{name}": value for name, value in inner.items()},
        }

    def has_pipeline(self, model: nn.Module) -> bool:
        return isinstance(self.inner, PipelinePlugin) and self.inner.has_pipeline(model)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        **options: bool,
    ) -> Mapping[str, Any]:
        """Run a batch through the inner plugin's pipeline; see `PipelinePlugin.execute_pipeline`.

        Collective: every rank of the group.
        """
        if not isinstance(self.inner, PipelinePlugin):
            msg = f"The inner plugin '{self.inner.name}' has no pipeline. Call the model, or choose `inner='hybrid'`."
            raise ConfigError(msg)
        if optimizer is not None and self._groups is not None:
            self._groups.begin()
            self._groups.forget()
        return self.inner.execute_pipeline(data_iter, model, criterion, optimizer, **options)


def _inner_plugin(inner: object, options: Mapping[str, Any] | None, precision: Any) -> Plugin:
    """Return the plugin inside of each group, or raise what is wrong with it."""
    if isinstance(inner, str):
        kind = load(inner)
        given = {**(options or {}), **({} if precision is None else {"precision": precision})}
        inner = kind(**given) if not issubclass(kind, FaultTolerantPlugin) else kind
    elif options or precision is not None:
        msg = "`inner_options` and `precision` go with the name of a plugin; pass them to the plugin object itself."
        raise ConfigError(msg)
    if isinstance(inner, FaultTolerantPlugin) or inner is FaultTolerantPlugin:
        msg = "`inner='ft'` puts replica groups into replica groups. Use 'ddp', 'zero', 'gemini', 'fsdp' or 'hybrid'."
        raise ConfigError(msg)
    if not isinstance(inner, Plugin):
        msg = f"`inner` is the name of a plugin or a Plugin object; got `{type(inner).__name__}`."
        raise TypeError(msg)
    if Capability.SYNCHRONOUS not in inner.capabilities:
        msg = (
            f"The inner plugin '{inner.name}' lets ranks step apart, so that averages of gradients between groups are "
            "not those of one batch. Use a synchronous one, such as 'ddp'; `sync_every` averages parameters."
        )
        raise ConfigError(msg)
    return inner


def _check_steps_on_parameters(model: ModelWrapper, optimizer: OptimizerWrapper, adapter: StateAdapter) -> None:
    trained = {id(each) for each in unwrap_model(model).parameters() if each.requires_grad}
    if not isinstance(adapter, ReplicatedStateAdapter) or not trained <= optimizer.listed_parameters():
        msg = (
            "`sync_every` needs an inner plugin that keeps the whole model on each rank and steps on its own "
            "parameters, such as inner='ddp'. Leave `sync_every` out, and gradients are averaged in each step."
        )
        raise ConfigError(msg)
