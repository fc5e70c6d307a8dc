"""Checks of the arguments of `Booster.boost`, and of the objects that a plugin's ``configure`` returns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from booster_core.errors import ConfigError, PluginError
from booster_core.plugin.interface import Boosted
from booster_core.plugin.optimizer import OptimizerWrapper
from booster_core.plugin.originals import was_boosted
from booster_core.plugin.wrappers import ModelWrapper, boosted_inside, unwrap_model
from booster_core.state.names import NamedTensors, own_class, without_adapters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from booster_core.plugin.interface import Plugin

_WRAPPED_ELSEWHERE = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_ORDER = "`boost(model, optimizer, criterion, dataloader, lr_scheduler)`"


def check_boost_arguments(objects: Boosted, further: Iterable[Any] = ()) -> None:
    """Check what a user passes to ``boost``, ``further`` data loaders too, before anything is changed.

    Raises:
        TypeError: If an argument has another type than its place asks for.
        ConfigError: If the model or the optimizer is boosted, wrapped or distributed already, or the optimizer holds
            parameters that are not the model's, or parameters have gradients, or two tensors would have one name, or
            the scheduler steers another optimizer.

    Collective: none.
    """
    _check_types(objects, further)
    model, optimizer, lr_scheduler = objects.model, objects.optimizer, objects.lr_scheduler
    if isinstance(boosted_inside(model), ModelWrapper) or was_boosted(model):
        name = own_class(unwrap_model(model)).__name__
        msg = (
            f"This `{name}` is already boosted, by this Booster or another, and its parameters are where that `boost` "
            "has put them. Use what it returned: pass a model to `boost` once, with an optimizer of all that is to be "
            "trained (parameter groups may have settings of their own). For another optimizer or plugin later, save "
            "the boosted model by `booster.save_model`, build a new one, `boost` that, and load it by "
            "`booster.load_model`; or `boost` a `copy.deepcopy` that was made before."
        )
        raise ConfigError(msg)
    _check_whole(model)
    outer = [base.__name__ for base in type(model).__mro__ if base.__name__ in _WRAPPED_ELSEWHERE]
    if outer:
        msg = f"The model is already wrapped by `{outer[0]}`. Pass the model itself; the plugin wraps it."
        raise ConfigError(msg)
    if isinstance(optimizer, OptimizerWrapper):
        msg = "The optimizer is already boosted. Make one from the parameters of the model that is passed with it."
        raise ConfigError(msg)
    NamedTensors.of(model)  # raises where two tensors would have one name
    if optimizer is not None:
        _check_parameters(model, optimizer)
        _check_gradients(model, optimizer)
    steered = getattr(lr_scheduler, "optimizer", optimizer)
    if lr_scheduler is not None and steered is not optimizer:
        msg = (
            f"The scheduler `{type(lr_scheduler).__name__}` steers another optimizer (`{type(steered).__name__}`) than "
            "the one passed to `boost`. Pass the two together."
        )
        raise ConfigError(msg)


def check_boosted(boosted: Boosted, objects: Boosted, plugin: Plugin) -> None:
    """Check what a plugin's ``configure`` returned.

    Raises:
        PluginError: If it is not a `Boosted` of wrappers that holds all that was passed.

    Collective: none.
    """
    problem = None
    if not isinstance(boosted, Boosted):
        problem = f"returned `{type(boosted).__name__}` instead of a `Boosted`"
    elif not isinstance(boosted.model, ModelWrapper):
        problem = f"returned a model of type `{type(boosted.model).__name__}` instead of a `ModelWrapper`"
    elif objects.optimizer is not None and not isinstance(boosted.optimizer, OptimizerWrapper):
        problem = f"returned an optimizer of type `{type(boosted.optimizer).__name__}` instead of an `OptimizerWrapper`"
    else:
        lost = [
            name for name, given in objects._asdict().items() if given is not None and getattr(boosted, name) is None
        ]
        if lost:
            problem = f"lost the {', '.join(lost)}"
    if problem is not None:
        msg = f"Plugin '{plugin.name}': `configure` {problem}. Report this to the plugin's authors."
        raise PluginError(msg)


def _check_types(objects: Boosted, further: Iterable[Any]) -> None:
    """Raise where an argument has the wrong type, as when two were passed in the wrong order."""
    model, optimizer, criterion, dataloader, lr_scheduler = objects
    if not isinstance(model, nn.Module):
        raise TypeError(_wrong_type("model", "a torch.nn.Module", model))
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(_wrong_type("optimizer", "a torch.optim.Optimizer", optimizer))
    if criterion is not None and not callable(criterion):
        raise TypeError(_wrong_type("criterion", "a callable", criterion))
    for loader in (*([] if dataloader is None else [dataloader]), *further):
        if not isinstance(loader, DataLoader):
            raise TypeError(_wrong_type("dataloader", "a torch.utils.data.DataLoader", loader))
    if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(_wrong_type("lr_scheduler", "a scheduler with a `step` method", lr_scheduler))


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


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise where the optimizer would train tensors that forward never reads."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [
        f"group {number}, index {index}, shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]
    if others:
        shown = "; ".join(others[:10]) + ("; ..." if len(others) > 10 else "")
        msg = (
            f"The optimizer holds {len(others)} parameter(s) that are not the model's: {shown}. Build it from "
            "`model.parameters()` of the model that is passed, after every change of the model's parameters."
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
