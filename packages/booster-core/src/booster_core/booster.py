"""`Booster`: wraps model, optimizer, criterion, data loader and scheduler once; the strategy is its plugin.

It checks what the user passes, lets the plugin configure it, and forwards later calls. It holds no strategy logic or
file code: its methods that save and load hand the plugin's view of a model's state to a `CheckpointIO`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import weakref
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import nn

from booster_core.checkpoint_io import (
    CheckpointIO,
    GlobalPosition,
    LoadRequest,
    ModelState,
    MovingAverage,
    SaveRequest,
    StepOptions,
    TrainingObjects,
    TrainingState,
    checkpoint_io_class,
    resolved,
)
from booster_core.discovery import check_api_version, load, load_default
from booster_core.errors import ConfigError, OffloadError
from booster_core.gradients import check_finite_norm, check_norm_arguments
from booster_core.log import log
from booster_core.plugin.checks import check_arguments, check_boosted, check_values, outline
from booster_core.plugin.guards import mark_boosted
from booster_core.plugin.hooks import hook_relay
from booster_core.plugin.interface import BoostContext, Boosted, Capability, PipelinePlugin, Plugin, as_tuple
from booster_core.plugin.model import ModelWrapper, boosted_inside, unwrap_model
from booster_core.plugin.optimizer import OptimizerWrapper
from booster_core.plugin.scaling import LossFactors
from booster_core.plugin.settings import (
    check_device,
    describe_precision,
    gradient_norm_dtype,
    own_device,
    precision_for,
    resolve_precision,
)
from booster_core.precision.policy import NARROW
from booster_core.ranks.calls import OBSERVERS, NamedCall, ObservedCall
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.environments import accelerator
from booster_core.ranks.launch import check_launched, ensure_process_group
from booster_core.run_settings import RunSettings
from booster_core.state.names import NamedTensors, named_modules
from booster_core.state.random_state import separate_random_state
from booster_core.state.replica_digests import check_equal_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from peft import LoraConfig, PeftModel
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset
    from typing_extensions import TypeVar

    from booster_core.checkpoint_io import LoadedCheckpoint, LoadReport
    from booster_core.plugin.scaling import GradientScaling
    from booster_core.precision import PrecisionPolicy
    from booster_core.state.adapter import StateAdapter

    _ModelT = TypeVar("_ModelT", bound=nn.Module)
    _CriterionT = TypeVar("_CriterionT", bound="Callable[..., Any] | None", default=None)
    _DataLoaderT = TypeVar("_DataLoaderT", bound="DataLoader[Any] | Sequence[DataLoader[Any]] | None", default=None)
    _LRSchedulerT = TypeVar("_LRSchedulerT", bound="LRScheduler | None", default=None)


__all__ = ["Booster"]


class Booster:
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
            or fp16 is trained as under that name, with updates in fp32; any other runs as it is. What is asked here
            wins over `booster run`'s ``--precision``, and the plugin over its ``--plugin``, with a warning.
        plugin: A plugin, the name of an installed one (``"ddp"``), or ``None`` for that of `booster run`, if any, else
            one device in one process.
        device_placement: Let the data loaders that `boost` and `prepare_dataloader` return hand out batches on the
            device, as `to_device` moves them.

    Raises:
        TypeError: If ``plugin`` is neither a name nor a `Plugin`, or ``device`` no device.
        PluginError: If no plugin of that name is installed, or it cannot be loaded, or was written for another version
            of the plugin interface.
        ConfigError: If precision is asked for twice with two answers, plugin, precision and device don't fit, or
            ``plugin="auto"``, which `booster_tools.choose_plugin` takes the place of.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        mixed_precision: PrecisionPolicy | str | None = None,
        plugin: Plugin | str | None = None,
        *,
        device_placement: bool = True,
    ) -> None:
        self.device_placement = device_placement
        if plugin == "auto":
            msg = (
                "`plugin='auto'` names no plugin. Pass what `booster_tools.choose_plugin(TrainingFunctions(build, "
                "batch, loss), memory_budget_bytes=...)` returns: the fastest installed one that fits."
            )
            raise ConfigError(msg)
        settings = RunSettings.of_this_run().left_by(plugin, mixed_precision)
        if isinstance(plugin, str):
            plugin = load(plugin)()
        elif plugin is None:
            plugin = load_default()() if settings.plugin is None else settings.make_plugin(load(settings.plugin))
        elif not isinstance(plugin, Plugin):
            got = f"the class `{plugin.__name__}`" if isinstance(plugin, type) else f"`{type(plugin).__name__}`"
            msg = f"`plugin` is the name of an installed plugin, such as 'ddp', or a Plugin object; got {got}."
            raise TypeError(msg)
        else:
            check_api_version(type(plugin), f"Plugin '{plugin.name}' ({type(plugin).__name__})", inherits=True)
        self.plugin = plugin
        self.precision = resolve_precision(settings.precision if mixed_precision is None else mixed_precision, plugin)
        self._asked_device = check_device(device, plugin)
        is_known = self._asked_device is None and accelerator() is None  # before the launch
        self._device = own_device(None, plugin) if is_known else None
        self._factors = LossFactors()
        # the boosted models that somebody still holds, and the formats that their tensors came in
        self._boosted: weakref.WeakKeyDictionary[ModelWrapper, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
        self._registered: dict[str, tuple[Any, bool]] = {}  # by name; whether ranks differ

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(type(self), name):
            object.__getattribute__(self, name)  # raises what the property did
        msg = f"`{type(self).__name__}` has no `{name}`."
        for package in ("booster_runtime", "booster_tools"):
            with contextlib.suppress(ImportError):
                if name in importlib.import_module(package).__all__:
                    msg = f"`{type(self).__name__}` has no `{name}`; there is `{package}.{name}`."
        msg += " What stands for calls of other libraries is in the documentation's pages 'Moving from ...'."
        raise AttributeError(msg, name=name, obj=self)

    @property
    def device(self) -> torch.device:
        """Where the model runs, fixed at the first use.

        Of several devices it is this process's own only once the run is launched: use it after the launch.

        Raises:
            ConfigError: If a launcher started several processes and the run is not launched yet.
        """
        if self._device is None:
            self._device = own_device(self._asked_device, self.plugin)
        return self._device

    @cached_property
    def context(self) -> BoostContext:
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

        From here on, ranks that see different samples draw different random numbers.

        A data loader is split between ranks (its batch size counts samples per rank): what its sampler draws is
        split, and of its batch sampler each rank takes one batch in turn. One that was made by
        ``plugin.prepare_dataloader``, has a ``DistributedSampler``, or keeps a position of its own (``state_dict``) is
        returned as it is.

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
        with coordinator.together("boost") as meeting:  # nothing has changed yet, on any rank
            check_arguments(objects, self.plugin)
            check_values(model, self.plugin, self.device)
            policy = precision_for(self.precision, objects, self.plugin)
            meeting.compare(outline(objects, self.plugin, policy))
            context = replace(self.context, precision=policy, meeting=meeting, prepared={})
            self.plugin.check_objects(objects, context)
        context = replace(context, meeting=None)
        norm_dtype = gradient_norm_dtype(model, policy)  # ranks may have parts of the model from here on
        dtypes = {name: tensor.dtype for name, tensor in NamedTensors.of(model).tensors.items()}
        context.hooks.before_configure(plugin=self.plugin, objects=objects, context=context)
        boosted = self.plugin.configure(objects, context)
        check_boosted(boosted, objects, self.plugin)
        wrapper: Any = boosted.model
        wrapper.attach(boosted.optimizers, context)
        for each in boosted.optimizers:
            each.set_model(wrapper.unwrap(), norm_dtype)
        for scaling in _scalings_of(boosted.optimizers):
            self._factors.add(scaling)
        mark_boosted(model)
        self._boosted[wrapper] = dtypes
        separate_random_state(self._data_index())  # models were made alike; dropout and augmentation differ by rank
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
        """Run backward from a loss, with the loss scale of the run and the weights of blocks such as `accumulate`.

        Args:
            loss: A scalar computed from the boosted model's output. Under accumulation, divide it by the number of
                micro-batches.
            optimizer: The optimizer that `boost` returned; of several, any or all. Of a loss of several models, pass
                one of each: under fp16 their steps are skipped together.
            **options: ``inputs`` and ``retain_graph``, as for ``Tensor.backward``.

        Raises:
            TypeError: If an optimizer is not a boosted one, the loss not a tensor, or there is another option.
            ConfigError: If the plugin can't give gradients to these ``inputs`` only, or blocks weigh the loss
                differently for its models.
            GradientError: If the loss is not a scalar or has no gradient.

        Collective: every data parallel rank, in step.
        """
        unknown = [f"`{name}`" for name in options if name not in ("inputs", "retain_graph")]
        if unknown:
            msg = f"`Booster.backward` takes no {' or '.join(unknown)}. Its options are `inputs` and `retain_graph`."
            raise TypeError(msg)
        optimizers = self._boosted_optimizers(optimizer, "backward")
        with self._factors.backward(_scalings_of(optimizers)):
            optimizers[0].backward(loss, **options)

    def clip_grad_by_norm(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients of several boosted models so that their joint norm is at most ``max_norm``.

        Args:
            optimizers: An optimizer of each model; each counts, and scales, all gradients of its model.
            max_norm: As for `OptimizerWrapper.clip_grad_by_norm`, like the arguments that follow.
            norm_type: Order of the norm.
            error_if_nonfinite: Raise where the norm is infinite or NaN.

        Returns:
            The joint norm before that, a scalar tensor, the same on every rank.

        Raises:
            TypeError: If an optimizer is not a boosted one.
            ConfigError: If ``max_norm`` is negative or ``norm_type`` is not positive.
            GradientError: If the norm is not finite and ``error_if_nonfinite`` is set.

        Collective: as the calls of each optimizer's `clip_grad_by_norm`, one after the other.
        """
        check_norm_arguments(max_norm, norm_type)
        every = [scaling.optimizers[0] for scaling in _scalings_of(self._boosted_optimizers(optimizers, "clip"))]
        norms = [each.clip_grad_by_norm(math.inf, norm_type) for each in every]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
        if error_if_nonfinite and not any(each.found_overflow for each in every):
            check_finite_norm(norm)
        for each in every:
            each.scale_to_norm(norm, max_norm)
        return norm

    def weighing_losses(self, weight: float, model: ModelWrapper | None = None) -> AbstractContextManager[None]:
        """Multiply the losses of `backward`, and of criteria in `execute_pipeline`, inside of a ``with`` block.

        Blocks may be nested; their weights are multiplied. Where ``loss.backward()`` is called instead, the next step
        raises.

        Args:
            weight: The factor.
            model: The boosted model whose losses are meant; ``None`` for all.
        """
        scalings = [] if model is None else _scalings_of(model.boosted_optimizers)
        if model is not None and not scalings:
            return contextlib.nullcontext()  # without an optimizer there is no backward
        return self._factors.weighing(weight, scalings[0] if scalings else None)

    def loss_weight(self, model: ModelWrapper) -> float:
        """Return what losses of a model are multiplied by now: the product of the weights of the blocks around."""
        return self._factors.weight_of(_scalings_of(model.boosted_optimizers))

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
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        return_loss: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        return_outputs: bool = False,  # noqa: FBT001, FBT002
    ) -> Mapping[str, Any]:
        """Run forward and backward of one batch through a pipeline; see `PipelinePlugin.execute_pipeline`.

        Of several optimizers any or all may be passed.

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

        optimizers = [each for each in as_tuple(optimizer) if isinstance(each, OptimizerWrapper)]
        scalings = _scalings_of(optimizers)

        def weighed(outputs: Any, batch: Any) -> Tensor:
            loss = criterion(outputs, batch)
            weight = self._factors.weight_of(scalings)  # also those that ``data_iter`` has entered
            return loss * weight if weight != 1 and isinstance(loss, torch.Tensor) else loss

        one = next(iter(as_tuple(optimizer)), None)
        with self._factors.backward(scalings, is_weighed=True) if scalings else contextlib.nullcontext():
            return self.plugin.execute_pipeline(
                data_iter, model, weighed, one, return_loss=return_loss, return_outputs=return_outputs
            )

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int = 1, **kwargs: Any) -> DataLoader[Any]:
        """Return a data loader over this rank's samples; see `Plugin.prepare_dataloader` for the arguments.

        Raises:
            ConfigError: If this process is one of several, and the script did not call `launch`.
        """
        check_launched()
        loader = self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)
        if self.device_placement and isinstance(loader, GlobalPosition):
            loader.device = self.device
        return loader

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own model of a boosted one."""
        return unwrap_model(self.boosted_model(model, "Booster.unwrap"))

    def describe(self) -> str:
        """Return, and print on the master rank, the run's plugin, ranks, device and number formats."""
        models = self.boosted_models
        notes = list(dict.fromkeys(line for model in models for line in self.plugin.describe_model(model)))
        is_said = any(line.startswith("reduction") for line in notes)  # what is asked for is not all there is to say
        found = dict.fromkeys(line for model in models for line in self._formats_of(model, says_reduce=not is_said))
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

    @cached_property
    def checkpoint_io(self) -> CheckpointIO:
        """The reader and writer of this run's checkpoints; may be replaced."""
        return checkpoint_io_class()(self.plugin, self.context)

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None = None) -> StateAdapter:
        """Return the view of a model's (and its optimizer's) state as shards.

        Args:
            model: The boosted model, a module of it, or a plain model that every rank holds whole.
            optimizer: The boosted optimizer; that of the boosted model when left out.

        Raises:
            OffloadError: If the model's state is offloaded between phases.
        """
        boosted = self._boosted_model(model)
        if boosted is None:
            from booster_core.state import PartView, ReplicatedStateAdapter

            whole, name = self._boosted_around(model)
            if whole is not None:
                return PartView(self.state_adapter(whole), name)
            return ReplicatedStateAdapter(model, optimizer, self.context.coordinator)
        if boosted.refuses_use is not None:
            raise OffloadError(boosted.refuses_use)
        return self.plugin.state_adapter(boosted, boosted.boost_context)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
        *,
        format: str | None = None,  # noqa: A002 - the field's word
        max_shard_size: int | str | None = None,
    ) -> None:
        """Write a model in the layout of Hugging Face libraries, without gathering it anywhere.

        A boosted model is written in the formats that it came in, the same under every plugin: see
        `PrecisionPolicy.export_dtype`. A plain one is written as it is.

        Args:
            model: The model that `boost` returned, a module of it (``model.encoder``, with its own names), or a plain
                model that every rank holds whole.
            checkpoint: A file, or with ``shard=True`` a folder. A model of transformers, diffusers or the Hub's mixin
                is written into a folder also without ``shard``, as one file with its configuration, unless the path
                ends in ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt``; one with adapters is not. Folders
                are made as needed; older files are replaced. A URL (``s3://bucket/model``) is uploaded to while it is
                written.
            shard: Write a folder of numbered files with their index, and the model's ``config.json`` where it has one.
            gather_dtensor: ``False`` is ``format="dcp"``.
            prefix: Put into the file names of a folder, as Hugging Face's ``variant``. With ``format="dcp"``,
                ``"model"`` nests the values below this key, where Accelerate looks for them; of an optimizer,
                ``"optimizer"`` does.
            size_per_shard: Largest size of a numbered file in MiB.
            use_safetensors: Write safetensors; ``False`` writes what ``torch.save`` of a dict writes.
            use_async: Copy the values, return, and write in the background; an error surfaces at the next save, load,
                `wait`, or the interpreter's exit.
            format: ``"dcp"`` writes a folder of ``torch.distributed.checkpoint`` instead.
            max_shard_size: ``size_per_shard`` in bytes, or as ``"5GB"``.

        Raises:
            TypeError: If ``model`` is not a module.
            ConfigError: If arguments contradict each other.
            CheckpointError: If the checkpoint can't be written; it is then as it was before.

        Collective: every rank of the world, as for every method here that saves or loads.
        """
        self._check_module(model, "save_model")
        request = SaveRequest.of_files(
            format=format,
            max_shard_size=max_shard_size,
            call="save_model",
            path=checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )
        with self._saving("model", request, model):
            self.checkpoint_io.save_model(self._model_state(model, self.export_dtypes(model)), request)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        exclude: Sequence[str] = (),
    ) -> LoadReport:
        """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

        Args:
            model: As for `save_model`.
            checkpoint: A file, an index, or a folder.
            strict: Raise unless model and checkpoint hold the same tensors; ``False`` loads those that fit.
            low_cpu_mem_mode: Has no effect: only what this rank holds is read, straight into place.
            num_threads: How many parts of a large tensor are read at once.
            rename: Regular expressions and what replaces them in the checkpoint's names, one after the other:
                ``{"^": "model."}`` adds a prefix. Or a function from a checkpoint's name to the model's.
            exclude: Patterns (``"lm_head.*"``) of the model's names, once renamed, that are left as they are.

        Returns:
            What was loaded and what was not, the same on every rank.

        Raises:
            TypeError: If ``model`` is not a module.
            CheckpointError: If the checkpoint can't be read, is damaged, or with ``strict`` does not fit.

        Collective: every rank of the world.
        """
        del low_cpu_mem_mode
        self._check_module(model, "load_model")
        request = LoadRequest(
            call="load_model",
            path=checkpoint,
            strict=strict,
            num_threads=num_threads,
            rename=rename,
            exclude=exclude,
        )
        with self._announced("model", request):
            return self.checkpoint_io.load_model(self._model_state(model), request)

    def save_lora_as_pretrained(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        *,
        selected_adapters: Sequence[str] | None = None,
        save_embedding_layers: bool | str = "auto",
    ) -> None:
        """Write a model's adapters as peft does, without gathering them anywhere.

        ``PeftModel.from_pretrained(base, checkpoint)`` loads them, and so does `Booster.enable_lora`. The adapter
        ``default`` is written into the folder itself, others below it by name.

        Args:
            model: The model that `boost` returned.
            checkpoint: The folder, or its URL.
            use_safetensors: Write ``adapter_model.safetensors``; ``False`` writes ``adapter_model.bin``.
            selected_adapters: Names of the adapters to write; all by default.
            save_embedding_layers: Also write the embeddings and the head. ``"auto"`` does as peft: where they have
                adapters, or the vocabulary is not that of the files that the base came from.

        Raises:
            ConfigError: If the model has no adapters, or none of a selected name.
            Exception: As `save_model`.

        Collective: every rank of the world.
        """
        self._check_module(model, "save_lora_as_pretrained")
        request = SaveRequest(
            call="save_lora_as_pretrained",
            path=checkpoint,
            use_safetensors=use_safetensors,
            save_embedding_layers=save_embedding_layers,
        )
        with self._saving("lora", request, model):
            state = self._model_state(model, self.export_dtypes(model))
            self.checkpoint_io.save_lora(state, request, selected_adapters)

    def save_optimizer(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
        *,
        format: str | None = None,  # noqa: A002 - the field's word
        max_shard_size: int | str | None = None,
    ) -> None:
        """Write the state of the optimizer that `boost` returned in safetensors files, its parameter groups as JSON.

        Arguments and errors are those of `save_model`; a `TypeError` is raised for another optimizer.

        Collective: every rank of the world.
        """
        model = self._model_of(optimizer, "save_optimizer")
        request = SaveRequest.of_files(
            format=format,
            max_shard_size=max_shard_size,
            call="save_optimizer",
            path=checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )
        with self._saving("optimizer", request, model):
            self.checkpoint_io.save_optimizer(self.state_adapter(model), request)

    def load_optimizer(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state and parameter groups, saved under any plugin and any number of ranks.

        Arguments and errors are those of `load_model`; a `TypeError` is raised for another optimizer than the one that
        `boost` returned, and a `CheckpointError` for the state of another model's optimizer.

        Collective: every rank of the world.
        """
        model = self._model_of(optimizer, "load_optimizer")
        del low_cpu_mem_mode
        request = LoadRequest(call="load_optimizer", path=checkpoint, num_threads=num_threads)
        with self._announced("optimizer", request):
            self.checkpoint_io.load_optimizer(self.state_adapter(model), request)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a scheduler's state as JSON; a `CheckpointError` is raised where that is not possible.

        Collective: every rank of the world.
        """
        request = SaveRequest(call="save_lr_scheduler", path=checkpoint)
        with self._announced("lr_scheduler", request):
            self.checkpoint_io.save_lr_scheduler(lr_scheduler, request)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a learning rate scheduler's state; a `CheckpointError` is raised where the file holds another's.

        Collective: every rank of the world.
        """
        request = LoadRequest(call="load_lr_scheduler", path=checkpoint)
        with self._announced("lr_scheduler", request):
            self.checkpoint_io.load_lr_scheduler(lr_scheduler, request)

    def save_checkpoint(
        self,
        root: str | Path,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Any = None,
        ema: MovingAverage | None = None,
        extra: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: float | None = None,
        use_async: bool = False,
        size_per_shard: int = 1024,
        save_frozen: bool = True,
    ) -> None:
        """Write the state of a whole training run, from which it resumes exactly, into ``root/step-00000100``.

        The loss scale and the random states of Python, NumPy and torch (CPU and this rank's CUDA device) of every rank
        are saved as well. Gradients are not: save between steps. A step appears complete or not at all, and the file
        ``root/latest`` moves to it last, so that a kill at any instant leaves the step before loadable. The run that
        saved or resumed last may save there; an earlier one that is still alive gets an error and changes nothing.
        ``root/step-00000100/model`` is a folder as Hugging Face libraries load it.

        Args:
            root: The folder of all steps, or a URL (``s3://bucket/run``), uploaded to while it is written.
            step: Number of steps taken so far. A step that exists is replaced.
            model: As for `save_model`.
            optimizer: The optimizer that `boost` returned.
            lr_scheduler: One scheduler, or several.
            dataloader: The loader that `boost` or `prepare_dataloader` returned; its position in the global order of
                samples is saved. Of another with ``state_dict`` (torchdata's) each rank's own state is.
            ema: What `ema` returned; its averages are saved in ``root/step-00000100/ema``, loadable like a model.
            extra: Your own JSON values and tensors, in dicts and lists; those of rank 0 are saved.
            keep_last: Keep this many steps up to this one. What no rule keeps is removed when this one is safe; without
                any rule all stay, and later steps, of a run that went back, always do.
            keep_every: Keep steps that are multiples of this.
            keep_best: Keep this many steps of those with the smallest ``metric``.
            metric: How good this step is, the same on all ranks; negate it where large is good.
            use_async: As for `save_model`.
            size_per_shard: Largest size of a file of tensors in MiB.
            save_frozen: ``False`` leaves frozen parameters out, such as the base of adapters, and notes a digest of
                them. `load_checkpoint` then needs a model that has them already, and compares. ``ema`` stays whole.

        Raises:
            TypeError: If ``model`` or ``optimizer`` are not what `boost` returned, or ``ema`` has no `state_adapter`.
            ConfigError: If an argument is out of range, or differs between ranks.
            CheckpointError: If something cannot be saved (it is named), or can't be written.

        Collective: every rank of the world.
        """
        options = StepOptions(
            step=step, extra=extra, metric=metric, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best
        )
        request = SaveRequest(
            call="save_checkpoint",
            path=root,
            size_per_shard=size_per_shard,
            use_async=use_async,
            save_frozen=save_frozen,
            step=options,
        )
        with self._saving("checkpoint", request, model):
            with self.context.coordinator.together(request.call):
                state = self._training_state(request.call, model, optimizer, lr_scheduler, dataloader, ema)
            self.checkpoint_io.save_checkpoint(state, request)

    def load_checkpoint(
        self,
        root: str | Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Any = None,
        ema: MovingAverage | None = None,
        step: int | str | None = None,
        resume: bool = False,
        strict: bool = True,
        verify: bool = True,
        num_threads: int = 1,
    ) -> LoadedCheckpoint:
        """Read what `save_checkpoint` wrote, under any plugin and with any number of ranks.

        Sizes, headers and small files are compared with the manifest before anything is changed, tensors while they are
        read: an error about a damaged tensor says that values have changed. Random states come back rank by rank; rank
        ``r`` of another number takes those of rank ``r % saved``. A data loader goes on at the sample after the last.

        Args:
            root: The folder of all steps, or a URL.
            model: As passed to `save_checkpoint`, like the arguments that follow; what is left out is not loaded.
            optimizer: The optimizer.
            lr_scheduler: The schedulers, in the same order.
            dataloader: The loader, over the same data set.
            ema: The averages; they need not have been made from the same values.
            step: A step; ``"latest"``, the default; or ``"newest-whole"``, the default of ``resume``, which goes back
                to the newest step that is whole where later ones are damaged, and logs which.
            resume: Go on with a run that restarts by itself: take over saving into ``root`` from an earlier one, and
                return step 0 where there is no checkpoint yet.
            strict: As for `load_model`.
            verify: Compare checksums of what is read, while it is read. Of a block that several ranks read parts of,
                one reads the whole. Sizes are compared in any case; `booster inspect --check` reads all of a step.
            num_threads: As for `load_model`.

        Returns:
            The step, the ``extra`` values, and what was loaded of the model.

        Raises:
            TypeError: If ``model`` or ``optimizer`` are not what `boost` returned.
            CheckpointError: If there is no such step, it is damaged (the newest intact one is named) or does not fit.

        Collective: every rank of the world.
        """
        request = LoadRequest(
            call="load_checkpoint",
            path=root,
            strict=strict,
            num_threads=num_threads,
            verify=verify,
            step=step,
            resume=resume,
        )
        with self._announced("checkpoint", request):
            with self.context.coordinator.together(request.call):
                state = self._training_state(request.call, model, optimizer, lr_scheduler, dataloader, ema)
            loaded = self.checkpoint_io.load_checkpoint(state, request)
        if not loaded.path:
            log.warning("There is no checkpoint in '%s' yet: the run begins at step 0.", request.path)
        return loaded

    def has_checkpoint(self, root: str | Path) -> bool:
        """Return whether there is a step below ``root``, damaged or not, the same on every rank.

        Collective: every rank of the world.
        """
        return self.checkpoint_io.has_checkpoint(resolved(root))

    def register_for_checkpointing(self, *objects: Any, name: str | None = None, per_rank: bool = False) -> None:
        """Have `save_checkpoint` save, and `load_checkpoint` load, objects with ``state_dict`` and ``load_state_dict``.

        Args:
            *objects: Their states are tensors and JSON values in dicts and lists, never pickled.
            name: What one object is called in checkpoints; others are numbered in the order in which they come.
            per_rank: Each rank has a state of its own, and gets it back. Else saving raises where ranks differ.

        Raises:
            TypeError: If an object lacks one of the methods.
            ConfigError: If the name is taken, names several objects, or is no name.

        Collective: none, but every rank must do the same.
        """
        for item in objects:
            if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")):
                msg = f"`{type(item).__name__}` has no `state_dict` and `load_state_dict`, so it can't be registered."
                raise TypeError(msg)
            key = str(len(self._registered)) if name is None else name
            if key in self._registered or not key or "/" in key or (name and len(objects) > 1):
                msg = f"`name={key!r}` must be one object's, without '/', and new: {', '.join(self._registered)}."
                raise ConfigError(msg)
            self._registered[key] = item, per_rank

    def wait(self) -> None:
        """Wait until a save in the background has ended.

        Raises:
            CheckpointError: If it failed, on any rank.

        Collective: every rank of the world.
        """
        self.checkpoint_io.wait()

    @staticmethod
    def _boosted_optimizers(optimizer: Optimizer | Sequence[Optimizer], call: str) -> list[OptimizerWrapper]:
        """Return the optimizers that were passed to a call.

        Raises:
            TypeError: If there is none, or one is not boosted.
        """
        asked = as_tuple(optimizer)
        boosted = [each for each in asked if isinstance(each, OptimizerWrapper)]
        if not boosted or len(boosted) < len(asked):
            got = next((type(each).__name__ for each in asked if not isinstance(each, OptimizerWrapper)), None)
            got = got or type(optimizer).__name__
            msg = f"`Booster.{call}` needs the optimizer returned by `Booster.boost`; got `{got}`."
            raise TypeError(msg)
        return boosted

    def _formats_of(self, model: ModelWrapper, *, says_reduce: bool) -> list[str]:
        """Return lines on the formats of a boosted model, read from its tensors."""
        masters = None
        is_narrow = any(parameter.dtype in NARROW for parameter in model.parameters())
        if is_narrow and model.boosted_optimizers:  # wider ones have no masters, and state may be on a disk
            shards = self.state_adapter(model).optimizer_shards()
            masters = next((shard.dtype for shard in shards if shard.state == "master"), None)
        return describe_precision(model.boost_context.precision, model, masters=masters, says_reduce=says_reduce)

    def _boosted_model(self, model: nn.Module) -> ModelWrapper | None:
        """Return the boosted model that ``model`` is, or is the inside of; ``None`` for a plain one."""
        model = boosted_inside(model)
        for boosted in self._boosted:
            if boosted is model or boosted.unwrap() is model:
                return boosted
        return None

    def _boosted_around(self, part: nn.Module) -> tuple[ModelWrapper | None, str]:
        """Return the boosted model that a module is a part of, and its name there; ``None`` where there is none."""
        for boosted in self._boosted:
            for name, _, module in named_modules(boosted.unwrap()):
                if module is part:
                    return boosted, name
        return None, ""

    def _model_state(
        self, model: nn.Module, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    ) -> ModelState:
        """Return a model as engines see it."""
        return ModelState(adapter=self.state_adapter(model), module=unwrap_model(model), dtype=dtype)

    def export_dtypes(self, model: nn.Module) -> dict[str, torch.dtype] | None:
        """Return the format in which `save_model` writes each tensor, by name; ``None`` for a plain model, as it is."""
        from booster_core.state import PartView

        boosted = self._boosted_model(model) or self._boosted_around(model)[0]
        if boosted is None:
            return None
        precision = boosted.boost_context.precision
        formats = {name: precision.export_dtype(dtype) for name, dtype in self._boosted[boosted].items()}
        adapter = self.state_adapter(model)
        if not isinstance(adapter, PartView):
            return formats
        return {inside: dtype for name, dtype in formats.items() for inside in adapter.names_in_part(name)[:1]}

    def _model_of(self, optimizer: Optimizer | Sequence[Optimizer], call: str) -> ModelWrapper:
        """Return the model that one optimizer, or several, were boosted with; all of it must be passed.

        Raises:
            TypeError: If one was not boosted by this Booster.
            ConfigError: If the model has another optimizer that is not passed.
        """
        asked = as_tuple(optimizer)
        for boosted in self._boosted:
            own = boosted.boosted_optimizers
            found = [each for each in own if any(one in (each, each.unwrap()) for one in asked)]
            if not found or len(found) < len(asked):
                continue
            if len(found) < len(own):
                msg = (
                    f"`Booster.{call}` got {len(found)} of the {len(own)} optimizers that the model was boosted with. "
                    "Pass all of them, as `boost` returned them: their state is one."
                )
                raise ConfigError(msg)
            return boosted
        got = ", ".join(f"`{type(each).__name__}`" for each in asked or (optimizer,))
        msg = f"`Booster.{call}` needs the optimizer returned by `Booster.boost`; got {got}."
        raise TypeError(msg)

    def _training_state(
        self,
        call: str,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None,
        dataloader: Any,
        ema: MovingAverage | None,
    ) -> TrainingState:
        """Return the parts of a training state, from the arguments that a user passes."""
        self._check_module(model, call)
        if ema is not None and not callable(getattr(ema, "state_adapter", None)):
            msg = f"`ema` of `Booster.{call}` must have a method `state_adapter`; got `{type(ema).__name__}`."
            raise TypeError(msg)
        boosted = self._boosted_model(model)
        precision = None if boosted is None else boosted.boost_context.precision
        schedulers = lr_scheduler if isinstance(lr_scheduler, (list, tuple)) else (lr_scheduler,)
        return TrainingState(
            model=self._model_state(model, None if precision is None else precision.save_dtype),
            optimizer=None if optimizer is None else self.state_adapter(self._model_of(optimizer, call)),
            objects=TrainingObjects(
                device=self.context.device,
                schedulers=tuple(scheduler for scheduler in schedulers if scheduler is not None),
                loss_scaler=getattr(next(iter(as_tuple(optimizer)), None), "loss_scaler", None),
                dataloader=dataloader,
                registered=dict(self._registered),
                data_index=self._data_index(),
            ),
            ema=None if ema is None else ModelState(adapter=ema.state_adapter()),
            precision=precision,
        )

    def _data_index(self) -> int:
        """Return this rank's index among those that see different samples."""
        return self.plugin.data_parallel_coordinates(self.context.coordinator)[0]

    def _check_module(self, model: Any, call: str) -> None:
        if not isinstance(model, nn.Module):
            msg = f"`Booster.{call}` needs a torch.nn.Module; got `{type(model).__name__}`."
            raise TypeError(msg)
        if isinstance(boosted_inside(model), ModelWrapper) and self._boosted_model(model) is None:
            msg = f"`Booster.{call}` needs a model that this Booster has boosted; this one belongs to another Booster."
            raise TypeError(msg)

    @contextlib.contextmanager
    def _saving(self, kind: str, request: SaveRequest, model: nn.Module) -> Iterator[None]:
        """Announce a save, and let the plugin synchronize a boosted model that is about to be saved."""
        with self._announced(kind, request):
            boosted = self._boosted_model(model) or self._boosted_around(model)[0]
            if boosted is not None and type(self.plugin).prepare_save is not Plugin.prepare_save:
                self.context.coordinator.block_all(name=request.call)  # who is missing is named by the user's call
                with NamedCall("save"):
                    self.plugin.prepare_save(boosted, boosted.boost_context)
            if boosted is not None and Capability.SYNCHRONOUS not in self.plugin.capabilities:
                self._check_replicas(kind, request.call, boosted)
            yield

    def _check_replicas(self, kind: str, call: str, model: ModelWrapper) -> None:
        """Compare what a save takes from one of several ranks, under a plugin that does not say that these are equal.

        Buffers are those of one rank under every plugin.

        Collective: every rank of the world.
        """
        adapter = self.state_adapter(model)
        shards = iter(()) if kind == "optimizer" else adapter.model_shards()
        if kind in ("optimizer", "checkpoint") and model.boosted_optimizers:
            shards = chain(shards, adapter.optimizer_shards())
        remedy = (
            f"Plugin '{self.plugin.name}' does not declare `Capability.SYNCHRONOUS`: it has to make ranks equal in "
            "`Plugin.prepare_save`, or show one rank's values in its `state_adapter`."
        )
        buffers = NamedTensors.of(unwrap_model(model)).buffers
        check_equal_replicas(shards, self.context.coordinator, call=call, remedy=remedy, but=buffers)

    @contextlib.contextmanager
    def _announced(self, kind: str, request: SaveRequest | LoadRequest) -> Iterator[None]:
        """Call the hooks before and after a save or load; after a save in the background, when that has ended."""
        verb = "save" if isinstance(request, SaveRequest) else "load"
        before, after = (getattr(self.context.hooks, f"{moment}_{verb}") for moment in ("before", "after"))
        before(kind=kind, checkpoint=request.path)
        with ObservedCall(verb) if OBSERVERS else contextlib.nullcontext():
            yield
        if isinstance(request, SaveRequest) and request.use_async:
            self.checkpoint_io.when_written(lambda: after(kind=kind, checkpoint=request.path))
        else:
            after(kind=kind, checkpoint=request.path)


def _scalings_of(optimizers: Sequence[OptimizerWrapper]) -> list[GradientScaling]:
    """Return what the optimizers of each model share, of each model once."""
    return list(dict.fromkeys(each.scaling for each in optimizers))
