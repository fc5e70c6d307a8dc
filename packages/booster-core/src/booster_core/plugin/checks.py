"""Checks of the arguments of `Booster.boost`, and of the objects that a plugin's ``configure`` returns."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.jit import ScriptModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from booster_core.checkpoint_io import keeps_position
from booster_core.errors import ConfigError, PluginError
from booster_core.plugin.guards import was_boosted
from booster_core.plugin.interface import Boosted, Capability, as_tuple
from booster_core.plugin.model import ModelWrapper, boosted_inside, unwrap_model
from booster_core.plugin.optimizer import OptimizerWrapper
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state.names import NamedTensors, has_adapters, own_class, without_adapters

if TYPE_CHECKING:
    import torch

    from booster_core.plugin.interface import Plugin
    from booster_core.precision import PrecisionPolicy

_WRAPPED_ELSEWHERE = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_ORDER = "`boost(model, optimizer, criterion, dataloader, lr_scheduler)`"


def check_arguments(objects: Boosted, plugin: Plugin | None = None) -> None:
    """Check what a user passes to ``boost`` before anything is changed.

    Args:
        objects: The arguments.
        plugin: The plugin; ``None`` where another one may be taken.

    Raises:
        TypeError: If an argument has another type than its place asks for.
        ConfigError: If the model or an optimizer is boosted, wrapped or distributed already, the model is scripted, an
            optimizer holds parameters that are not the model's, or another optimizer's, or parameters have gradients,
            two tensors would have one name, a scheduler steers another optimizer, or the plugin trains by one
            optimizer only.
    """
    _check_types(objects)
    model, optimizers = objects.model, objects.optimizers
    if isinstance(model, ScriptModule):
        msg = (
            "The model is scripted or traced (`torch.jit`), and can't be wrapped: torch puts no hooks on it. Pass the "
            "model itself, and compile it by `torch.compile` where that is what scripting was for."
        )
        raise ConfigError(msg)
    if isinstance(boosted_inside(model), ModelWrapper) or was_boosted(model):
        name = own_class(unwrap_model(model)).__name__
        msg = (
            f"This `{name}` is already boosted, by this Booster or another, and its parameters are where that `boost` "
            "has put them. Use what it returned: pass a model to `boost` once, with an optimizer of all that it "
            "trains (parameter groups may have settings of their own). For another optimizer or plugin later, save "
            "the boosted model by `booster.save_model`, build a new one, `boost` that, and load it by "
            "`booster.load_model`; or `boost` a `copy.deepcopy` that was made before."
        )
        raise ConfigError(msg)
    _check_whole(model)
    outer = [base.__name__ for base in type(model).__mro__ if base.__name__ in _WRAPPED_ELSEWHERE]
    if outer:
        msg = f"The model is already wrapped by `{outer[0]}`. Pass the model itself; the plugin wraps it."
        raise ConfigError(msg)
    if any(isinstance(optimizer, OptimizerWrapper) for optimizer in optimizers):
        msg = "The optimizer is already boosted. Make one from the parameters of the model that is passed with it."
        raise ConfigError(msg)
    if len(optimizers) > 1 and plugin is not None and Capability.SEVERAL_OPTIMIZERS not in plugin.capabilities:
        msg = (
            f"Plugin '{plugin.name}' trains a model by one optimizer; got {len(optimizers)}. Pass one with several "
            "parameter groups, or choose a plugin that takes several, such as 'ddp'."
        )
        raise ConfigError(msg)
    NamedTensors.of(model)  # raises where two tensors would have one name
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        _check_parameters(model, optimizer, index, owners)
        _check_gradients(model, optimizer)
    for scheduler in as_tuple(objects.lr_scheduler):
        steered = getattr(scheduler, "optimizer", None)
        if steered is not None and not any(steered is optimizer for optimizer in optimizers):
            msg = (
                f"The scheduler `{type(scheduler).__name__}` steers another optimizer (`{type(steered).__name__}`) "
                "than the one passed to `boost`. Pass the two together."
            )
            raise ConfigError(msg)


def check_values(model: nn.Module, plugin: Plugin, device: torch.device) -> None:
    """Raise where a model has no values, or has adapters, and the plugin does not declare that it takes such a model.

    Raises:
        ConfigError: If so. The run may be on the meta device, for which a model needs no values.
    """
    own = unwrap_model(model)
    tensors = [*own.named_parameters(), *own.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty and device.type != "meta" and Capability.LAZY_INIT not in plugin.capabilities:
        msg = (
            f"{len(empty)} tensor(s) of the model have no values, such as '{empty[0]}': they are on the meta device, "
            f"and plugin '{plugin.name}' does not give them any. Build the model outside of `LazyInitContext` and "
            "`torch.device('meta')`, or choose a plugin that declares `Capability.LAZY_INIT`."
        )
        raise ConfigError(msg)
    if has_adapters(own) and Capability.LORA not in plugin.capabilities:
        msg = (
            f"Plugin '{plugin.name}' does not train adapters, and the model has some of peft. Merge them by "
            "`model.merge_and_unload()`, or choose a plugin that declares `Capability.LORA`."
        )
        raise ConfigError(msg)


def outline(objects: Boosted, plugin: Plugin, policy: PrecisionPolicy) -> dict[str, Any]:
    """Return what every rank must bring to ``boost`` alike: the plugin and its options, the precision, the objects.

    Of these the names, shapes and formats of parameters, and the groups.
    """
    tensors = NamedTensors.of(objects.model).tensors
    forms = {
        f"'{name}'": f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
        + (", trained" if tensor.requires_grad else "")
        for name, tensor in tensors.items()
    }
    groups = [
        [type(each).__name__, *(len(group["params"]) for group in each.param_groups)] for each in objects.optimizers
    ]
    passed = {
        "criterion": objects.criterion is not None,
        "dataloader": len(as_tuple(objects.dataloader)),
        "lr_scheduler": objects.lr_scheduler is not None,
    }
    options = {"plugin": plugin.name, "precision": asdict(policy), **plugin.agreed_options()}
    return {**options, **forms, "optimizers and their groups": groups, "passed": passed}


def check_boosted(boosted: Boosted, objects: Boosted, plugin: Plugin) -> None:
    """Check what a plugin's ``configure`` returned.

    Raises:
        PluginError: If it is not a `Boosted` of wrappers that holds all that was passed.
    """
    problem = None
    if not isinstance(boosted, Boosted):
        problem = f"returned `{type(boosted).__name__}` instead of a `Boosted`"
    elif not isinstance(boosted.model, ModelWrapper):
        problem = f"returned a model of type `{type(boosted.model).__name__}` instead of a `ModelWrapper`"
    elif other := [each for each in boosted.optimizers if not isinstance(each, OptimizerWrapper)]:
        problem = f"returned an optimizer of type `{type(other[0]).__name__}` instead of an `OptimizerWrapper`"
    elif len(boosted.optimizers) != len(objects.optimizers):
        problem = f"returned {len(boosted.optimizers)} optimizers for {len(objects.optimizers)}"
    else:
        lost = [
            name for name, given in objects._asdict().items() if given is not None and getattr(boosted, name) is None
        ]
        if lost:
            problem = f"lost the {', '.join(lost)}"
        elif not all(map(_is_split, as_tuple(boosted.dataloader))) and _has_several_shares(plugin):
            problem = (
                "returned a data loader that is not split between ranks, so that all would see the same samples; split "
                "it by `booster_runtime.data.shard_dataloader(dataloader, self, context)`"
            )
    if problem is not None:
        msg = f"Plugin '{plugin.name}': `configure` {problem}. Report this to the plugin's authors."
        raise PluginError(msg)


def _is_split(loader: DataLoader[Any]) -> bool:
    if keeps_position(loader):  # of the samples of this rank, where it is no `GlobalPosition`
        return True
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(each, DistributedSampler) for each in samplers)


def _has_several_shares(plugin: Plugin) -> bool:
    return plugin.data_parallel_coordinates(DistCoordinator())[1] > 1


def _check_types(objects: Boosted) -> None:
    """Raise where an argument has the wrong type, as when two were passed in the wrong order."""
    if not isinstance(objects.model, nn.Module):
        raise TypeError(_wrong_type("model", "a torch.nn.Module", objects.model))
    for optimizer in objects.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(_wrong_type("optimizer", "a torch.optim.Optimizer, or several in a list", optimizer))
    if objects.criterion is not None and not callable(objects.criterion):
        raise TypeError(_wrong_type("criterion", "a callable", objects.criterion))
    for loader in as_tuple(objects.dataloader):
        if not isinstance(loader, DataLoader) and not keeps_position(loader):
            asked = "a torch.utils.data.DataLoader, or a loader of this rank's samples with a `state_dict`"
            raise TypeError(_wrong_type("dataloader", asked, loader))
    for scheduler in as_tuple(objects.lr_scheduler):
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(_wrong_type("lr_scheduler", "a scheduler with a `step` method", scheduler))


def _check_whole(model: nn.Module) -> None:
    """Raise where somebody has distributed the model over ranks: a strategy would take a part of it for the whole."""
    own = unwrap_model(model)
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # else there is none
    tensors: dict[str, Any] = {**dict(own.named_parameters()), **dict(own.named_buffers())}
    name = next((name for name, tensor in tensors.items() if isinstance(tensor, dtensor)), None)
    if name is not None:
        what = f"'{name}' is a DTensor, {tensors[name].placements} on {tensors[name].device_mesh}"
    elif getattr(without_adapters(own), "is_distributed_loading_by_transformers", False):
        what = f"transformers has given this rank its part, which begins with '{next(iter(tensors), '')}'"
    else:
        return
    msg = (
        f"The model is distributed over ranks already: {what}. Distributing it is the plugin's part. Load it without "
        "`distributed_config` and `tp_plan`, or build it without `fully_shard` and `parallelize_module`, and choose "
        "the plugin: 'fsdp' or 'gemini' shard parameters, 'hybrid' splits layers (`tp_size`) and makes stages "
        "(`pp_size`). Under `LazyInitContext` no rank has the whole model."
    )
    raise ConfigError(msg)


def _check_parameters(model: nn.Module, optimizer: Optimizer, index: int, owners: dict[int, int]) -> None:
    """Raise where the optimizer would train tensors that forward never reads, or that another one trains."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [
        f"group {number}, index {position}, shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]
    if others:
        shown = "; ".join(others[:10]) + ("; ..." if len(others) > 10 else "")
        msg = (
            f"The optimizer holds {len(others)} parameter(s) that are not the model's: {shown}. Build it from "
            "`model.parameters()` of the model that is passed, after every change of the model's parameters. To train "
            "two models by one loss, boost one `nn.Module` that holds both and calls them in its forward, with this "
            "optimizer; or boost each with an optimizer of its own, pass both to `booster.backward(loss, [...])`, and "
            "clip by the joint norm with `booster.clip_grad_by_norm([...], max_norm)`."
        )
        raise ConfigError(msg)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    twice = [parameter for parameter in held if owners.setdefault(id(parameter), index) != index]
    if twice:
        name_of = NamedTensors.of(model).name_of
        msg = (
            f"{len(twice)} parameter(s) are in two of the optimizers, such as '{name_of[id(twice[0])]}' in those at "
            f"{owners[id(twice[0])]} and {index}. Each parameter belongs to one: leave it out of the others."
        )
        raise ConfigError(msg)


def _check_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise where parameters have gradients, which would be neither averaged nor scaled."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    waiting = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in held and parameter.grad is not None and bool(parameter.grad.any())
    ]
    if waiting:
        shown = ", ".join(map(repr, waiting[:3])) + (", ..." if len(waiting) > 3 else "")
        msg = (
            f"{len(waiting)} parameter(s) have gradients from before `boost`: {shown}. They are neither averaged over "
            "ranks nor scaled as later ones are. Take the step, or call `optimizer.zero_grad()`, before `boost`."
        )
        raise ConfigError(msg)


def _wrong_type(name: str, expected: str, got: Any) -> str:
    return f"`{name}` of {_ORDER} must be {expected}; got `{type(got).__name__}`."
