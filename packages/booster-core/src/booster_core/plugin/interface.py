"""The interface between `Booster` and a parallel strategy.

A strategy subclasses `Plugin` (or `PipelinePlugin`), states a ``name`` and its `Capability` set, and implements
``configure``. Everything else has a default here that is right for a strategy that keeps the whole model on every rank.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from booster_core.errors import ConfigError, PluginError
from booster_core.plugin.options import refuse_renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from peft import LoraConfig, PeftModel
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset, Sampler
    from typing_extensions import Self, TypeVar

    from booster_core.booster import Booster
    from booster_core.plugin.model import ModelWrapper
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks.coordinator import DistCoordinator, Together
    from booster_core.state.adapter import StateAdapter

    _ModelT_co = TypeVar("_ModelT_co", bound=nn.Module, default=nn.Module, covariant=True)
    _OptimizerT_co = TypeVar(
        "_OptimizerT_co", bound="Optimizer | Sequence[Optimizer] | None", default=Any, covariant=True
    )
    _CriterionT_co = TypeVar(
        "_CriterionT_co", bound="Callable[..., Any] | None", default="Callable[..., Any] | None", covariant=True
    )
    _DataLoaderT_co = TypeVar(
        "_DataLoaderT_co", bound="DataLoader[Any] | Sequence[DataLoader[Any]] | None", default=Any, covariant=True
    )
    _LRSchedulerT_co = TypeVar(
        "_LRSchedulerT_co", bound="LRScheduler | Sequence[LRScheduler] | None", default=Any, covariant=True
    )

API_VERSION = 2
"""Version of this interface. A plugin made for another one is refused when it is loaded."""


class Capability(enum.Enum):
    """What a plugin can do. Asking for what it has not declared raises before anything is built."""

    CPU = "cpu"
    """Runs on the CPU."""
    CUDA = "cuda"
    """Runs on CUDA devices, and on other accelerators, which are driven in the same way."""
    FP32 = "fp32"
    """Trains with parameters, compute and gradients in fp32."""
    BF16 = "bf16"
    """Trains with compute in bf16."""
    FP16 = "fp16"
    """Trains with compute in fp16 under a dynamic loss scale."""
    LORA = "lora"
    """Trains low-rank adapters of a frozen base."""
    LAZY_INIT = "lazy_init"
    """Gives a model its values that was built without them, under ``LazyInitContext``."""
    PIPELINE = "pipeline"
    """Has `PipelinePlugin.execute_pipeline`, and may need it."""
    SEVERAL_OPTIMIZERS = "several_optimizers"
    """Trains a model by several optimizers, each with parameters of its own."""
    DATA_PARALLEL = "data_parallel"
    """Ranks see different samples."""
    SYNCHRONOUS = "synchronous"
    """Every step equals that of one process with the global batch, up to rounding."""


SYNCHRONOUS_TRAINING = frozenset(
    {
        Capability.CPU,
        Capability.CUDA,
        Capability.FP32,
        Capability.BF16,
        Capability.FP16,
        Capability.SYNCHRONOUS,
    }
)
"""What a plugin can do that trains as one process does, on every device and in every precision."""

if TYPE_CHECKING:
    # Generic for type checkers, so that a script that unpacks the five things gets their types.
    class Boosted(NamedTuple, Generic[_ModelT_co, _OptimizerT_co, _CriterionT_co, _DataLoaderT_co, _LRSchedulerT_co]):
        """The five things that `Booster.boost` takes and returns, in their order.

        Of several optimizers, loaders or schedulers of one model there is a list or tuple.
        """

        model: _ModelT_co
        optimizer: _OptimizerT_co = None  # type: ignore[assignment]
        criterion: _CriterionT_co = None  # type: ignore[assignment]
        dataloader: _DataLoaderT_co = None  # type: ignore[assignment]
        lr_scheduler: _LRSchedulerT_co = None  # type: ignore[assignment]

        @property
        def optimizers(self) -> tuple[Any, ...]:
            """The optimizers, of which there may be none."""
else:

    class Boosted(NamedTuple):
        """The five things that `Booster.boost` takes and returns, in their order.

        Of several optimizers, loaders or schedulers of one model there is a list or tuple.
        """

        model: nn.Module
        optimizer: Optimizer | None = None
        criterion: Callable[..., Any] | None = None
        dataloader: DataLoader[Any] | None = None
        lr_scheduler: LRScheduler | None = None

        @property
        def optimizers(self) -> tuple[Any, ...]:
            """The optimizers, of which there may be none."""
            return as_tuple(self.optimizer)


def as_tuple(given: Any) -> tuple[Any, ...]:
    """Return what was passed as a list or tuple, by itself, or not at all, as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def like(given: Any, made: Sequence[Any]) -> Any:
    """Return what was made of ``given``, of which ``as_tuple`` made a tuple, in the form in which it was passed."""
    if given is None:
        return None
    return type(given)(made) if isinstance(given, (list, tuple)) else made[0]


@dataclass(frozen=True, kw_only=True)
class BoostContext:
    """The facts of a run, and of one ``boost``, that a plugin gets in ``configure``.

    Args:
        booster: Whose ``boost`` it is.
        device: The device of this rank; the model has not been moved to it yet.
        coordinator: Rank facts, and meetings that name missing ranks.
        precision: The precision, resolved for the plugin and the model.
        device_placement: Whether data loaders hand out batches on the device.
        hooks: The pluggy hook relay of `booster_core.plugin.hookspecs`.
        meeting: Of ``check_objects``: compares values between ranks, by `Together.compare`.
        prepared: What ``check_objects`` has found out for ``configure``, by names of the plugin's choice.
    """

    booster: Booster = field(repr=False)
    device: torch.device
    coordinator: DistCoordinator
    precision: PrecisionPolicy
    device_placement: bool = True
    hooks: Any = field(repr=False)
    meeting: Together | None = field(default=None, repr=False)
    prepared: dict[str, Any] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> BoostContext:
        return self  # a copy of a boosted model or optimizer belongs to the same run

    def __reduce__(self) -> Any:
        return _no_context, ()  # a run can't be pickled with a model


def _no_context() -> None:
    """Return what stands for the run of a boosted model that was pickled."""


class Plugin(ABC):
    """One way to train on many devices. Subclasses state a ``name`` and implement `configure`.

    A plugin is constructible before the process group exists, and checks its constructor's arguments at once. It may
    configure any number of models; state of one belongs to the wrappers that it returns.

    Attributes:
        name: The name of its entry point, as in ``Booster(plugin=name)``.
        api_version: The version of this interface that the plugin was written for, as a literal: ``api_version = 2``.
            Not ``API_VERSION``, which would match any core that is installed.
        capabilities: What the plugin can do.
        precision: The precision asked for through the plugin's constructor; ``None`` where none was.
        needs_process_group: Whether `boost` starts a process group of one where nothing was launched.
        renamed_arguments: What to do in the place of passing an argument that the constructor does not take, by its
            name: those of other libraries' plugins, or of earlier versions.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CPU, Capability.FP32, Capability.DATA_PARALLEL}
    )
    precision: PrecisionPolicy | str | None = None
    needs_process_group: ClassVar[bool] = True
    renamed_arguments: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse arguments that the constructor does not take, with what stands for them.

        Raises:
            TypeError: Naming the argument and the remedy.
        """
        refuse_renamed(cls, cls.renamed_arguments, args, kwargs)
        return super().__new__(cls)

    @abstractmethod
    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Return the objects made ready for this strategy.

        The returned model is a `ModelWrapper` and each optimizer an `OptimizerWrapper`. The scheduler is returned as it
        came. Where ranks see different samples, the data loader comes back split between them: by
        `booster_runtime.data.shard_dataloader`, or with a ``torch.utils.data.DistributedSampler``.

        Args:
            objects: What the user passed to ``boost``, checked: optimizers hold only the model's parameters.
            context: Device, ranks, precision and hooks.

        Collective: every rank of the world, in step.
        """

    def check_objects(self, objects: Boosted, context: BoostContext) -> None:  # noqa: B027 - none is needed
        """Raise what is wrong with the arguments of ``boost`` for this plugin, before anything is changed.

        What it raises on one rank is raised on all. It must not communicate. What ranks must have alike it hands to
        ``context.meeting.compare``.
        """

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the precision that a run under this plugin has when a user asks for ``policy``.

        Override it where working parameters are kept in low precision next to fp32 masters. The default is right for
        plugins whose optimizer steps on the parameters themselves.

        Raises:
            ConfigError: If the plugin can't keep the formats that the policy names.
        """
        from booster_core.plugin.settings import check_no_masters

        return check_no_masters(policy, self.name)

    def supports_device(self, device_type: str) -> bool:
        """Return whether the plugin runs on devices of this type, such as ``"cpu"`` or ``"cuda"``.

        The accelerator of this machine is driven as CUDA is, whatever its type.
        """
        from booster_core.ranks.environments import accelerator

        kind = Capability.CUDA.value if device_type == accelerator() else device_type
        return kind in {capability.value for capability in self.capabilities}

    def data_parallel_coordinates(self, coordinator: DistCoordinator) -> tuple[int, int]:
        """Return this rank's index among, and the number of, ranks that see different samples.

        Data loaders are split by it, those that `boost` is given and those that `prepare_dataloader` makes.
        """
        return coordinator.rank, coordinator.world_size

    def state_adapter(self, model: ModelWrapper, context: BoostContext) -> StateAdapter:
        """Return the view of a model's state, and that of its optimizers, that checkpoints are written against.

        The default serves plugins that keep the whole model and optimizers on every rank.

        Args:
            model: The boosted model, which knows its ``boosted_optimizers``.
            context: Of the run.

        Collective: none. Communicate in `prepare_save`, which runs before each save.
        """
        from booster_core.state import ReplicatedStateAdapter

        return ReplicatedStateAdapter(model, model.boosted_optimizers, context.coordinator)

    def prepare_save(self, model: ModelWrapper, context: BoostContext) -> None:  # noqa: B027 - the default does nothing
        """Synchronize the ranks' state before a save; the default is for plugins whose replicas are always equal.

        Called before each save of a model, its adapters, its optimizer or a training state.

        Collective: every rank of the world.
        """

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which ``backward`` accumulates without communication, where that saves any.

        Gradients after the first backward outside of the context equal those of one large batch, whether or not this
        saves communication; the default saves none.
        """
        del model
        return contextlib.nullcontext()

    def parameter_paths(self, model: nn.Module) -> Mapping[str, str]:
        """Return where each parameter of a boosted model is, by its names: the path as for ``get_parameter``.

        Names are the user's, and the paths themselves; the same on every rank, with those that other ranks hold.

        Args:
            model: The boosted model.
        """
        from booster_core.plugin.model import unwrap_model
        from booster_core.state.names import NamedTensors

        module = unwrap_model(model)
        present = {path: path for path, _ in module.named_parameters(remove_duplicate=False)}
        return present | {name: path for name, path in NamedTensors.of(module).paths.items() if path in present}

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter as the optimizer will use it, in the parameter's shape.

        Loss scaling is taken out. The default serves plugins whose parameters carry whole gradients.

        Args:
            model: The boosted model; its optimizers know of a loss scale.
            name: The path of the parameter, as in `parameter_paths`.

        Returns:
            A copy, shape of the parameter; ``None`` where the parameter has no gradient.

        Collective: every rank of the plugin's mesh, in step.
        """
        from booster_core.plugin.model import unwrap_model
        from booster_core.plugin.optimizer import unscaled_gradient

        return unscaled_gradient(unwrap_model(model).get_parameter(name), model.boosted_optimizers)

    def set_full_gradient(self, model: ModelWrapper, name: str, values: Tensor) -> None:
        """Replace the gradient of a parameter that has one, which `full_gradient` has returned just before.

        The default serves plugins whose parameters carry whole gradients.

        Args:
            model: The boosted model.
            name: As for `full_gradient`.
            values: The same on every rank, without loss scale, in the shape of the whole parameter.

        Raises:
            PluginError: If the plugin keeps gradients in its own way and does not support this.
            ConfigError: On every rank, if this can't be done for the parameter.

        Collective: every rank of the plugin's mesh, in step.
        """
        from booster_core.plugin.model import unwrap_model
        from booster_core.plugin.optimizer import write_gradient

        if type(self).full_gradient is not Plugin.full_gradient:
            msg = f"Plugin '{self.name}' keeps gradients in its own way, and has no `set_full_gradient`."
            raise PluginError(msg)
        gradient = unwrap_model(model).get_parameter(name).grad
        assert gradient is not None, "`full_gradient` has returned it"
        write_gradient(gradient, values, model.boosted_optimizers)

    def enable_lora(
        self,
        model: nn.Module,
        *,
        lora_config: LoraConfig | None,
        pretrained_dir: str | Path | None,
        quantization: Any,
        context: BoostContext,
    ) -> PeftModel:
        """Put low-rank adapters into a model, in place; see `Booster.enable_lora`. The default refuses.

        Raises:
            ConfigError: Unless the plugin is a `booster_runtime.strategy.Strategy`, which has adapters.
        """
        del model, lora_config, pretrained_dir, quantization, context
        msg = (
            f"Plugin '{self.name}' does not train adapters. Use one that extends `booster_runtime.strategy.Strategy`, "
            "such as 'ddp'; on one device, run `pip install booster-runtime`."
        )
        raise ConfigError(msg)

    def describe_model(self, model: ModelWrapper) -> Sequence[str]:
        """Return lines about a boosted model, for `Booster.describe`."""
        del model
        return ()

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        seed: int = 1024,
        drop_last: bool = False,  # noqa: FBT001, FBT002
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        num_workers: int = 0,
        distributed_sampler_cls: type[Sampler[int]] | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a data loader that gives each data parallel rank its own samples.

        Ranks are told apart by `data_parallel_coordinates`: those that work on one batch together get the same. Every
        rank gets equally many batches: samples at the end of an epoch are repeated where they don't divide by the
        number of ranks. The default is a plain loader with a ``torch.utils.data.DistributedSampler``, whose
        ``set_epoch`` is the caller's to call; that of `booster_runtime.strategy.Strategy` counts epochs by itself,
        resumes at any sample, and takes iterable data sets.

        Args:
            dataset: A data set with a length.
            batch_size: Samples per batch and rank; at least 1.
            shuffle: Draw a new order each epoch; not possible for iterable data sets.
            seed: Seed of the order and of the workers; must be equal on all ranks.
            drop_last: Leave out the last batch where it would be smaller, or samples that don't divide by the ranks.
            pin_memory: Copy batches to pinned memory, for faster transfers to a GPU.
            num_workers: Processes that load ahead; 0 loads in this one.
            distributed_sampler_cls: Sampler of your own that knows of ranks, constructed as
                ``cls(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)``.
            **kwargs: Further arguments of ``torch.utils.data.DataLoader``.

        Raises:
            TypeError: If ``seed`` is no integer.
            ConfigError: If ``batch_size`` is below 1, the data set has fewer samples than there are ranks, or it is an
                iterable one.
        """
        from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

        from booster_core.ranks.coordinator import DistCoordinator

        rank, world_size = self.data_parallel_coordinates(DistCoordinator())
        if isinstance(dataset, IterableDataset):
            msg = (
                f"Plugin '{self.name}' has no loader for iterable data sets. Use one that extends "
                "`booster_runtime.strategy.Strategy`, such as 'ddp'; on one device, run `pip install booster-runtime`."
            )
            raise ConfigError(msg)
        if batch_size < 1:
            msg = f"`batch_size={batch_size}` must be at least 1: it is the number of samples per rank and step."
            raise ConfigError(msg)
        make: Any = distributed_sampler_cls
        if make is None:
            make = functools.partial(DistributedSampler, seed=seed, drop_last=drop_last)
        sampler = make(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        settings = {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
        return DataLoader(dataset, batch_size, sampler=sampler, **settings)

    def describe(self) -> Mapping[str, object]:
        """Return the plugin's options and their values, for `Booster.describe`."""
        return {}

    def agreed_options(self) -> Mapping[str, object]:
        """Return the options that `boost` compares between ranks, and raises where they differ: all by default.

        Leave out what may be another on each host, such as a folder.
        """
        return self.describe()


class PipelinePlugin(Plugin):
    """A plugin whose forward and backward are interleaved over stages, so that it drives the step itself."""

    def has_pipeline(self, model: nn.Module) -> bool:
        """Return whether a boosted model runs through `execute_pipeline`, as opposed to being called."""
        del model
        return True

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Mapping[str, Any]:
        """Run forward and, with an optimizer, backward of one batch from ``data_iter`` through all stages.

        Args:
            data_iter: Yields batches; one is taken.
            model: The boosted model.
            criterion: Called as ``criterion(outputs, batch)``, returns a scalar.
            optimizer: The boosted optimizer, one of several; ``None`` evaluates without backward.
            return_loss: Return the batch's mean loss under ``"loss"`` (``None`` on stages without it).
            return_outputs: Return the batch's outputs under ``"outputs"`` (``None`` on stages without them).

        Collective: every rank of the plugin's mesh, in step.
        """
