"""`Booster`: wraps model, optimizer, criterion, data loader and scheduler once; the strategy is its plugin.

It checks what the user passes, lets the plugin configure it, and forwards later calls. It holds no strategy logic or
file code.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch

from booster_core.attribute_hints import no_attribute
from booster_core.checkpoint_io import GlobalPosition
from booster_core.errors import ConfigError
from booster_core.plugin.checks import check_arguments, check_boosted, check_values, outline
from booster_core.plugin.discovery import check_api_version, load, load_default
from booster_core.plugin.hooks import hook_relay
from booster_core.plugin.interface import BoostContext, Boosted, PipelinePlugin, Plugin, as_tuple
from booster_core.plugin.optimizer import OptimizerWrapper
from booster_core.plugin.originals import mark_boosted
from booster_core.plugin.replicated import gradient_norm_dtype
from booster_core.plugin.settings import check_device, describe_precision, own_device, precision_for, resolve_precision
from booster_core.plugin.wrappers import ModelWrapper, boosted_inside, unwrap_model
from booster_core.precision.policy import NARROW
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.launch import ensure_process_group
from booster_core.saving import Saving
from booster_core.state.names import NamedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from peft import LoraConfig, PeftModel
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset
    from typing_extensions import TypeVar

    from booster_core.precision import PrecisionPolicy

    _ModelT = TypeVar("_ModelT", bound=nn.Module)
    _CriterionT = TypeVar("_CriterionT", bound="Callable[..., Any] | None", default=None)
    _DataLoaderT = TypeVar("_DataLoaderT", bound="DataLoader[Any] | Sequence[DataLoader[Any]] | None", default=None)
    _LRSchedulerT = TypeVar("_LRSchedulerT", bound="LRScheduler | None", default=None)


__all__ = ["Booster", "LossWeight"]


class LossWeight:
    """What `Booster.weighing_losses` multiplies losses by.

    Attributes:
        weight: The factor.
        is_used: Whether a loss, or a criterion for a pipeline, was multiplied.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.is_used = False


class Booster(Saving):
    """Makes a training script distributed by the strategy of a plugin.

    Functions of other packages take a Booster first. Of booster_runtime: ``train_batch``, ``evaluate_batch``,
    ``accumulate``, ``join`` (loops); ``gather_for_metrics``, ``reduce``, ``to_device`` (data); ``full_gradient``,
    ``set_full_gradient``, ``gathered``, ``full_state``, ``set_full_state`` (whole tensors); ``ema``,
    ``check_replicas``. Of booster_tools: ``profile`` and others.

    Args:
        device: Where the model runs: a device, its name, or ``None`` for this process's CUDA device where there is one
            and the plugin supports it, else the CPU. It is looked up at the first use.
        mixed_precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"pure-bf16"``, or a `PrecisionPolicy`. Where nothing is
            asked, here or through the plugin, each `boost` follows its model: one whose trained parameters are in bf16
            or fp16 is trained as under that name, with updates in fp32; any other runs as it is.
        plugin: A plugin, the name of an installed one (``"ddp"``), or ``None`` for one device in one process.
        device_placement: Let the data loaders that `boost` and `prepare_dataloader` return hand out batches on the
            device, as `to_device` moves them.

    Raises:
        TypeError: If ``plugin`` is neither a name nor a `Plugin`, or ``device`` no device.
        PluginError: If no plugin of that name is installed, or it cannot be loaded, or was written for another version
            of the plugin interface.
        ConfigError: If precision is asked for twice with two answers, plugin, precision and device don't fit, or
            ``plugin="auto"``, which `booster_tools.choose_plugin` takes the place of.

    Collective: none.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        mixed_precision: PrecisionPolicy | str | None = None,
        plugin: Plugin | str | None = None,
        *,
        device_placement: bool = True,
    ) -> None:
        super().__init__()
        self.device_placement = device_placement
        if plugin == "auto":
            msg = (
                "`plugin='auto'` names no plugin. Pass what `booster_tools.choose_plugin(model, optimizer, criterion, "
                "dataloader, memory_budget_bytes=...)` returns: the fastest installed one that fits."
            )
            raise ConfigError(msg)
        if isinstance(plugin, str):
            plugin = load(plugin)()
        elif plugin is None:
            plugin = load_default()()
        elif not isinstance(plugin, Plugin):
            got = f"the class `{plugin.__name__}`" if isinstance(plugin, type) else f"`{type(plugin).__name__}`"
            msg = f"`plugin` is the name of an installed plugin, such as 'ddp', or a Plugin object; got {got}."
            raise TypeError(msg)
        else:
            check_api_version(type(plugin), f"Plugin '{plugin.name}' ({type(plugin).__name__})", inherits=True)
        self.plugin = plugin
        self.precision = resolve_precision(mixed_precision, plugin)
        self._asked_device = check_device(device, plugin)
        is_known = self._asked_device is None and not torch.cuda.is_available()  # before the launch
        self._device = own_device(None, plugin) if is_known else None
        self._loss_weights: list[LossWeight] = []

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(type(self), name):
            object.__getattribute__(self, name)  # raises what the property did
        raise no_attribute(self, name)

    @property
    def device(self) -> torch.device:
        """Where the model runs, fixed at the first use.

        Of several CUDA devices it is this process's own only once the run is launched: use it after the launch.

        Raises:
            ConfigError: If a launcher started several processes and the run is not launched yet.
        """
        if self._device is None:
            self._device = own_device(self._asked_device, self.plugin)
        return self._device

    @cached_property
    def context(self) -> BoostContext:  # type: ignore[override] # made at the first use
        """Device, ranks, precision and hooks of this run, fixed at the first use."""
        if self.plugin.needs_process_group:
            ensure_process_group()
        return BoostContext(
            booster=self,
            device=self.device,
            coordinator=DistCoordinator(),
            precision=self.precision,
            device_placement=self.device_placement,
            hooks=hook_relay(),
        )

    @overload
    def boost(
        self,
        model: _ModelT,
        optimizer: Optimizer,
        criterion: _CriterionT = ...,
        dataloader: _DataLoaderT = ...,
        lr_scheduler: _LRSchedulerT = ...,
    ) -> Boosted[_ModelT, OptimizerWrapper, _CriterionT, _DataLoaderT, _LRSchedulerT]: ...

    @overload
    def boost(
        self,
        model: _ModelT,
        optimizer: None = None,
        criterion: _CriterionT = ...,
        dataloader: _DataLoaderT = ...,
        lr_scheduler: _LRSchedulerT = ...,
    ) -> Boosted[_ModelT, None, _CriterionT, _DataLoaderT, _LRSchedulerT]: ...

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> Boosted[Any, Any, Any, Any, Any]:
        """Make model, optimizer, criterion, data loader and scheduler ready for the plugin's strategy.

        A data loader is split between ranks (its batch size counts samples per rank): what its sampler draws is dealt
        to ranks, and of its batch sampler each rank takes one batch in turn. One that was made by
        ``plugin.prepare_dataloader``, or has a ``DistributedSampler``, is returned as it is.

        Args:
            model: The user's model, on any device; each model is boosted once.
            optimizer: Any ``torch.optim.Optimizer`` over parameters of the model, with or without state. Of several in
                a list or tuple, each parameter belongs to one; each steps by itself, and clipping is over all.
            criterion: Computes the loss; returned as it is.
            dataloader: Yields batches; of a list or tuple of loaders, each is split.
            lr_scheduler: A scheduler over an ``optimizer``, or several; they keep working after the call.

        Returns:
            The five things in the same order, lists and tuples as such; those not passed are ``None``. The model is a
            `ModelWrapper`, which type checkers take for the type of the user's model, whose attributes it has; an
            optimizer is an `OptimizerWrapper`.

        Raises:
            TypeError: If an argument is of another type.
            ConfigError: If the model or optimizer is boosted already, by any Booster, an optimizer holds parameters
                that are not the model's or another's, they have gradients that no step was taken with, ranks have
                models of different formats, the plugin trains by one optimizer only, or the data loader can't be split,
                as where its data set is split already or has other lengths on some ranks.

        Collective: every rank of the world.
        """
        objects = Boosted(model, optimizer, criterion, dataloader, lr_scheduler)
        coordinator = self.context.coordinator
        with coordinator.together("boost"):  # nothing has changed yet, on any rank
            check_arguments(objects, self.plugin)
            check_values(model, self.plugin, self.device)
            policy = precision_for(self.precision, objects, self.plugin)
            self.plugin.check_objects(objects, self.context)
        coordinator.agree("boost", {"plugin": self.plugin.name, "precision": policy.name, **outline(objects)})
        context = replace(self.context, precision=policy)
        norm_dtype = gradient_norm_dtype(model, policy)  # ranks may have parts of the model from here on
        dtypes = {name: tensor.dtype for name, tensor in NamedTensors.of(model).tensors.items()}
        context.hooks.before_configure(plugin=self.plugin, objects=objects, context=context)
        boosted = self.plugin.configure(objects, context)
        check_boosted(boosted, objects, self.plugin)
        wrapper: Any = boosted.model
        wrapper.attach(boosted.optimizers, context)
        for each in boosted.optimizers:
            each.set_model(wrapper.unwrap(), norm_dtype)
        mark_boosted(model)
        self._boosted.add(wrapper)
        self._dtypes[wrapper] = dtypes
        context.hooks.after_configure(booster=self, plugin=self.plugin, boosted=boosted, context=context)
        return boosted

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: LoraConfig | None = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    ) -> PeftModel:
        """Put low-rank adapters into a model, in place, and freeze the rest. Call it before `boost`.

        Make the optimizer from the returned model's parameters. Adapted layers keep their names in checkpoints.

        Args:
            model: The user's model.
            pretrained_dir: A folder that `save_lora_as_pretrained` or peft wrote: training of its adapters goes on.
            lora_config: Settings of new adapters; this or ``pretrained_dir``.
            bnb_quantization_config: A ``transformers.BitsAndBytesConfig`` by which the base is quantised.
            quantize: Keep the base in 4 bits (nf4), where no ``bnb_quantization_config`` is given.

        Returns:
            The model to pass to `boost`.

        Raises:
            TypeError: If ``model`` is no module, or ``lora_config`` no ``peft.LoraConfig``.
            ConfigError: If peft is not installed, the plugin does not train adapters, the model is boosted, compiled or
                has adapters already, ``target_modules`` matches no module, or a base is quantised elsewhere than on
                CUDA.
            CheckpointError: If ``pretrained_dir`` holds no adapters, or none for this model.

        Collective: every rank of the world, with ``pretrained_dir``; else none.
        """
        return self.plugin.enable_lora(
            model,
            lora_config=lora_config,
            pretrained_dir=pretrained_dir,
            quantization=bnb_quantization_config if bnb_quantization_config is not None else quantize or None,
            context=self.context,
        )

    def backward(self, loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> None:
        """Run backward from a loss, with the loss scale of the run.

        Args:
            loss: A scalar computed from the boosted model's output. Under accumulation, divide it by the number of
                micro-batches.
            optimizer: The optimizer that `boost` returned; of several, any or all.
            **options: ``inputs`` and ``retain_graph``, as for ``Tensor.backward``.

        Raises:
            TypeError: If the optimizer is not a boosted one, the loss not a tensor, or there is another option.
            ConfigError: If the plugin can't give gradients to these ``inputs`` only.
            GradientError: If the loss is not a scalar or has no gradient.

        Collective: every data parallel rank, in step.
        """
        unknown = [f"`{name}`" for name in options if name not in ("inputs", "retain_graph")]
        if unknown:
            msg = f"`Booster.backward` takes no {' or '.join(unknown)}. Its options are `inputs` and `retain_graph`."
            raise TypeError(msg)
        first = next(iter(as_tuple(optimizer)), None)
        if not isinstance(first, OptimizerWrapper):
            got = type(optimizer if first is None else first).__name__
            msg = f"`Booster.backward` needs the optimizer returned by `Booster.boost`; got `{got}`."
            raise TypeError(msg)
        first.backward(self._weighed(loss), **options)

    @contextlib.contextmanager
    def weighing_losses(self, weight: float) -> Iterator[LossWeight]:
        """Multiply the losses of `backward`, and of criteria in `execute_pipeline`, inside of a ``with`` block.

        Blocks may be nested; their weights are multiplied.

        Args:
            weight: The factor.

        Yields:
            The weight, which knows whether it was used.
        """
        entered = LossWeight(weight)
        self._loss_weights.append(entered)
        try:
            yield entered
        finally:
            self._loss_weights.remove(entered)

    @property
    def loss_weight(self) -> float:
        """What losses are multiplied by now: the product of the weights of the blocks around."""
        return math.prod(each.weight for each in self._loss_weights)

    def _weighed(self, loss: Any) -> Any:
        for each in self._loss_weights:
            each.is_used = True
        weight = self.loss_weight
        return loss * weight if weight != 1 and isinstance(loss, torch.Tensor) else loss

    @property
    def boosted_models(self) -> tuple[ModelWrapper, ...]:
        """The models that this Booster has boosted and somebody still holds."""
        return tuple(self._boosted)

    def boosted_model(self, model: nn.Module | None, call: str) -> ModelWrapper:
        """Return the boosted model that was passed to a call, or the only one there is.

        Args:
            model: What the user passed; ``None`` where it was left out.
            call: What the user called, for messages.

        Raises:
            TypeError: If the model is not one that this Booster has boosted.
            ConfigError: If it is left out and not exactly one is boosted.
        """
        if model is None:
            if len(self._boosted) != 1:
                msg = f"`{call}` needs to be told which model: {len(self._boosted)} models are boosted."
                raise ConfigError(msg)
            return next(iter(self._boosted))
        model = boosted_inside(model)
        if not isinstance(model, ModelWrapper) or model not in self._boosted:
            got = f"{type(model).__module__}.{type(model).__qualname__}"
            msg = f"`{call}` needs the model returned by `Booster.boost`; got `{got}`."
            raise TypeError(msg)
        return model

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for forward and backward of all but the last micro-batch of an accumulation.

        Legal under every plugin; saves communication where the plugin can.

        Args:
            model: The boosted model; may be left out when one model is boosted.
            optimizer: Accepted for scripts that pass it; the model knows its optimizers.

        Raises:
            TypeError: If the model is not a boosted one.
            ConfigError: If the model is left out and not exactly one is boosted.

        Collective: none, but every rank must do the same.
        """
        del optimizer
        return self.plugin.no_sync(self.boosted_model(model, "Booster.no_sync"))

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        return_loss: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        return_outputs: bool = False,  # noqa: FBT001, FBT002
    ) -> Mapping[str, Any]:
        """Run forward and backward of one batch through a pipeline; see `PipelinePlugin.execute_pipeline`.

        Raises:
            ConfigError: If the plugin has no pipeline.

        Collective: every rank of the plugin's mesh.
        """
        if not isinstance(self.plugin, PipelinePlugin):
            msg = (
                f"Plugin '{self.plugin.name}' has no pipeline to execute. Call the model, `booster.backward` and "
                "`optimizer.step`, or choose a plugin with pipeline parallelism, such as 'hybrid'."
            )
            raise ConfigError(msg)

        def weighed(outputs: Any, batch: Any) -> Tensor:
            loss: Tensor = self._weighed(criterion(outputs, batch))
            return loss

        result = self.plugin.execute_pipeline(
            data_iter, model, weighed, optimizer, return_loss=return_loss, return_outputs=return_outputs
        )
        for each in self._loss_weights:  # also those that ``data_iter`` has entered, on stages without a criterion
            each.is_used = True
        return result

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int = 1, **kwargs: Any) -> DataLoader[Any]:
        """Return a data loader over this rank's samples; see `Plugin.prepare_dataloader` for the arguments.

        Collective: none.
        """
        loader = self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)
        if self.device_placement and isinstance(loader, GlobalPosition):
            loader.device = self.device
        return loader

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own model of a boosted one.

        Collective: none.
        """
        return unwrap_model(self.boosted_model(model, "Booster.unwrap"))

    def describe(self) -> str:
        """Return, and print on the master rank, the run's plugin, ranks, device and number formats.

        Collective: none.
        """
        models = self.boosted_models
        notes = list(dict.fromkeys(line for model in models for line in self.plugin.describe_model(model)))
        is_said = any(line.startswith("reduction") for line in notes)  # what is asked for is not all there is to say
        found = dict.fromkeys(line for model in models for line in self._formats_of(model, is_said=is_said))
        coordinator = self.context.coordinator
        lines = [
            f"plugin     {self.plugin.name} ({type(self.plugin).__name__})",
            *(f"           {name}={value!r}" for name, value in self.plugin.describe().items()),
            f"world      {coordinator.world_size} rank(s), {coordinator.timeout_seconds:g} s time limit",
            f"device     {self.device}",
            *(found or describe_precision(self.precision)),
        ]
        text = "\n".join([*lines, *notes])
        coordinator.print_on_master(text)
        return text

    def _formats_of(self, model: ModelWrapper, *, is_said: bool) -> list[str]:
        """Return lines on the formats of a boosted model, read from its tensors; without that of sums if it is said."""
        masters = None
        is_narrow = any(parameter.dtype in NARROW for parameter in model.parameters())
        if is_narrow and model.boosted_optimizers:  # wider ones have no masters, and state may be on a disk
            shards = self.state_adapter(model).optimizer_shards()
            masters = next((shard.dtype for shard in shards if shard.state == "master"), None)
        return describe_precision(model.boost_context.precision, model, masters=masters, says_reduce=not is_said)
