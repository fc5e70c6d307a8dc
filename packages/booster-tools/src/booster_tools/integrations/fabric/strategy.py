"""`BoosterStrategy`: Lightning Fabric's loop over a model that a `Booster` trains, under any plugin.

Fabric wraps model and optimizer in classes of its own and asks its strategy for what is distributed; the strategy here
asks the Booster. References: Fabric's ``Strategy`` interface, https://lightning.ai/docs/fabric/stable/api/strategies.html
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins import Precision
from lightning_fabric.strategies import Strategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import ModelWrapper, OptimizerWrapper, PipelinePlugin
from booster_runtime.lazy import LazyInitContext
from booster_tools.integrations.fabric.optimizer import DelegatingOptimizer, inner_optimizer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn

    from booster_core import Booster


class BoosterStrategy(Strategy):  # type: ignore[misc] # lightning_fabric is not installed where types are checked
    """A strategy of Lightning Fabric by which a Booster trains: ``Fabric(strategy=BoosterStrategy(booster))``.

    ``fabric.setup(model, optimizer)`` boosts, data loaders are dealt to ranks by the Booster, ``fabric.save`` and
    ``fabric.load`` write and read training states as `Booster.save_checkpoint` does, for any number of ranks.
    Launch by ``torchrun`` and `booster_core.launch_from_torch`, before ``Fabric``. Models may be made in
    ``fabric.init_module()``, which records them without memory.

    Args:
        booster: Trains the models; precision is its own, and Fabric's stays ``"32-true"``.

    Raises:
        ConfigError: If Fabric is given another precision; at ``setup``, if there are several optimizers of a model, or
            the plugin runs it through a pipeline.

    Collective: none.
    """

    def __init__(self, booster: Booster) -> None:
        super().__init__()
        self.booster = booster
        self._boosted: dict[int, tuple[nn.Module, OptimizerWrapper | None]] = {}
        self._backward_sync_control = _SkipsSync(self)

    @property
    def precision(self) -> Precision:
        """Fabric's precision, which changes nothing."""
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and type(precision) is not Precision:
            msg = (
                f"Fabric was given the precision {type(precision).__name__}, and the Booster has its own. Leave "
                '`precision` out of `Fabric`, and pass `Booster(mixed_precision="bf16")`.'
            )
            raise ConfigError(msg)

    @property
    def root_device(self) -> torch.device:
        """The Booster's device."""
        return self.booster.device

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.booster.context.coordinator.rank

    @property
    def local_rank(self) -> int:
        """This rank on its host."""
        return self.booster.context.coordinator.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.booster.context.coordinator.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the other ranks, and let Fabric log on rank 0 only.

        Collective: every rank of the world.
        """
        rank_zero_only.rank = self.global_rank
        if self.accelerator is not None and self.root_device.type != "cpu":
            self.accelerator.setup_device(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:  # noqa: FBT001
        """Record the construction of a model without memory, whether its values will be loaded or not."""
        del empty_init
        return LazyInitContext()

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model where it is: `boost` places it, and no rank need have room for the whole."""

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of this rank's samples."""
        context = self.booster.context
        dealt = context.hooks.deal_dataloader(
            loader=dataloader, plugin=self.booster.plugin, coordinator=context.coordinator
        )
        return dataloader if dealt is None else dealt

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the model boosted without an optimizer.

        Collective: every rank of the world, as is `setup_module_and_optimizers`.
        """
        return self._boost(module, None, None)[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: LRScheduler | None = None
    ) -> tuple[nn.Module, list[Optimizer], LRScheduler | None]:
        """Return what `Booster.boost` makes of a model and its optimizer."""
        if len(optimizers) > 1:
            msg = f"A model is boosted with one optimizer, and `fabric.setup` got {len(optimizers)}. Use groups of one."
            raise ConfigError(msg)
        model, optimizer, scheduler = self._boost(module, optimizers[0] if optimizers else None, scheduler)
        return model, [] if optimizer is None else [DelegatingOptimizer(optimizer)], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse: an optimizer is boosted with its model."""
        del optimizer
        raise ConfigError(self._err_msg_joint_setup_required())

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward by the Booster, as `Booster.backward` does.

        Raises:
            ConfigError: If there are further arguments, or several models train and ``model`` is left out.

        Collective: every data parallel rank.
        """
        if args or kwargs:
            msg = f"`fabric.backward` takes no {', '.join(kwargs) or 'further arguments'} under a Booster."
            raise ConfigError(msg)
        trained = [optimizer for _, optimizer in self._boosted.values() if optimizer is not None]
        chosen = self._boosted.get(id(module), (None, None))[1] if module is not None else None
        if chosen is None and len(trained) != 1:
            msg = f"{len(trained)} models train: `fabric.backward(loss, model=model)` says which one's loss it is."
            raise ConfigError(msg)
        self.booster.backward(tensor, trained[0] if chosen is None else chosen)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,  # noqa: FBT001, FBT002 - Fabric's signature
    ) -> Tensor:
        """Clip by the global norm, and return it.

        Collective: every rank of the plugin's mesh.
        """
        del module
        return inner_optimizer(optimizer).clip_grad_by_norm(
            float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element."""
        del module
        inner_optimizer(optimizer).clip_grad_by_value(float(clip_val))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        del name
        self.booster.context.coordinator.block_all()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a rank's object on all ranks."""
        return self.booster.context.coordinator.broadcast_object(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Return the tensors of all ranks, stacked; one rank's as it is."""
        if sync_grads:
            gathered_with_gradients: Tensor = _all_gather_ddp_if_available(tensor, group, sync_grads)
            return gathered_with_gradients
        if self.world_size == 1:
            return tensor
        gathered = [torch.empty_like(tensor, requires_grad=False) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach().contiguous(), group)
        return torch.stack(gathered)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum or another reduction over ranks; what is no tensor is returned as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return _sync_ddp_if_available(tensor.detach().clone(), group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, FBT001, FBT002
        """Return whether all ranks, or any, decide so."""
        decisions = self.booster.context.coordinator.all_gather_object(bool(decision))
        return sum(decisions) == len(decisions) if all else any(decisions)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 - Fabric's signature
    ) -> None:
        """Write a training state, as `Booster.save_checkpoint` does, into a folder.

        Raises:
            ConfigError: If ``state`` has not one model, or something that is not supported is asked for.

        Collective: every rank of the world.
        """
        if storage_options is not None or filter:
            msg = "`fabric.save` takes neither `filter` nor `storage_options` under a Booster."
            raise ConfigError(msg)
        known, rest = _sorted_state(state)
        extra = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in rest.items()}
        self.booster.save_checkpoint(path, step=0, extra=extra, **known)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002 - Fabric's signature
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """Read what ``fabric.save`` wrote, in place, and return what ``state`` has no place for.

        Raises:
            CheckpointError: If the checkpoint lacks something that ``state`` names, or is damaged.

        Collective: every rank of the world.
        """
        del weights_only  # nothing is unpickled
        if isinstance(state, ModelWrapper):
            self.booster.load_model(state, path, strict=strict)
            return {}
        known, rest = _sorted_state(state or {})
        extra = dict(self.booster.load_checkpoint(path, strict=strict, **known).extra or {})
        missing = [name for name in rest if name not in extra]
        if missing and strict:
            names = ", ".join(map(repr, missing))
            msg = f"'{path}' has no {names}; it has {sorted(extra)}. Pass `strict=False` to go on without."
            raise CheckpointError(msg)
        for name, value in rest.items():
            if name in extra and hasattr(value, "load_state_dict"):
                value.load_state_dict(extra.pop(name))
            elif name in extra:
                state[name] = extra.pop(name)
        return extra

    def _boost(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> tuple[nn.Module, OptimizerWrapper | None, LRScheduler | None]:
        boosted = self.booster.boost(model, optimizer, lr_scheduler=scheduler)
        plugin = self.booster.plugin
        if isinstance(plugin, PipelinePlugin) and plugin.has_pipeline(boosted.model):
            msg = (
                f"Fabric calls the model, and plugin '{plugin.name}' runs this one through a pipeline. Use "
                "`pp_size=1`, or a loop with `booster.train_batch`."
            )
            raise ConfigError(msg)
        self._boosted[id(boosted.model)] = boosted.model, boosted.optimizer
        return boosted.model, boosted.optimizer, boosted.lr_scheduler


class _SkipsSync(_BackwardSyncControl):  # type: ignore[misc] # as above
    """What ``fabric.no_backward_sync`` enters."""

    def __init__(self, strategy: BoosterStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:  # noqa: FBT001
        """Accumulate gradients, without communication where the plugin can."""
        return self._strategy.booster.no_sync(module) if enabled else contextlib.nullcontext()


def _sorted_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `Booster.save_checkpoint` in a state of Fabric's, and the rest by name."""
    kinds = {"model": ModelWrapper, "optimizer": Optimizer, "lr_scheduler": LRScheduler, "dataloader": DataLoader}
    known: dict[str, Any] = {}
    rest = dict(state)
    for argument, kind in kinds.items():
        found = [name for name, value in state.items() if isinstance(value, kind)]
        if len(found) > 1 or (not found and argument == "model"):
            msg = f"A checkpoint has one {argument}, and the state has {found}. Save each model into its own folder."
            raise ConfigError(msg)
        for name in found:
            value = rest.pop(name)
            known[argument] = inner_optimizer(value) if argument == "optimizer" else value
    return known, rest
