"""The device and the precision of a run, from what `Booster` and its plugin were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.discovery import names_of_plugins
from booster_core.errors import ConfigError
from booster_core.plugin.interface import Boosted, Plugin
from booster_core.precision import PrecisionPolicy
from booster_core.precision.policy import dtype_name
from booster_core.ranks.devices import accelerator
from booster_core.ranks.environments import detect

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def resolve_precision(asked: PrecisionPolicy | str | None, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision of a run; one that follows the model, where none was asked for.

    Args:
        asked: What Booster was asked for.
        plugin: Its plugin, which may have been asked as well.

    Raises:
        ConfigError: If the two answers differ, or the plugin does not support the precision.
    """
    if isinstance(asked, str) and asked in names_of_plugins():
        msg = f"`mixed_precision={asked!r}` is the name of a plugin. Did you mean `Booster(plugin={asked!r})`?"
        raise ConfigError(msg)
    own = None if plugin.precision is None else PrecisionPolicy.parse(plugin.precision)
    given = None if asked is None else PrecisionPolicy.parse(asked)
    if own is not None and given is not None and own != given:
        msg = (
            f"Precision was asked for twice with two answers: `mixed_precision={asked!r}` of Booster and "
            f"`precision={plugin.precision!r}` of plugin '{plugin.name}'. Give it in one place."
        )
        raise ConfigError(msg)
    return supported_precision(own or given or PrecisionPolicy(param_dtype=None, follows_model=True), plugin)


def precision_for(policy: PrecisionPolicy, objects: Boosted, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision in which objects are boosted: that of the run, unless it follows the model that is trained.

    Args:
        policy: What `resolve_precision` returned for the run.
        objects: What the user passed to ``boost``; a model without an optimizer is left as it is.
        plugin: The plugin of the run.

    Raises:
        ConfigError: If the plugin does not support the format of the model's trained parameters.
    """
    wanted = policy if objects.optimizer is None else policy.for_model(objects.model)
    if wanted is policy:
        return policy
    try:
        return supported_precision(wanted, plugin)
    except ConfigError as cause:
        msg = (
            f"No precision was asked for, and the model's trained parameters are in {wanted.name}, so that it is "
            f"trained as under `mixed_precision='{wanted.name}'`: {cause} To train it in fp32, pass "
            "`mixed_precision='fp32'`."
        )
        raise ConfigError(msg) from cause


def supported_precision(policy: PrecisionPolicy, plugin: Plugin) -> PrecisionPolicy:
    """Return the precision that a run has under a plugin when a policy is asked for.

    Raises:
        ConfigError: If the plugin does not support it.
    """
    supported = sorted({"fp32", "bf16", "fp16"} & {capability.value for capability in plugin.capabilities})
    if policy.name not in supported:
        msg = f"Plugin '{plugin.name}' does not support precision '{policy.name}'. It supports: {', '.join(supported)}."
        raise ConfigError(msg)
    return plugin.resolve_precision(policy)


def describe_precision(
    policy: PrecisionPolicy,
    model: nn.Module | None = None,
    *,
    masters: torch.dtype | None = None,
    says_reduce: bool = True,
) -> list[str]:
    """Return lines on the formats of a run, for `Booster.describe`.

    Args:
        policy: What was asked for, or the precision of a boosted model.
        model: The boosted model, whose tensors say what they are; ``None`` where nothing is boosted yet.
        masters: Format of the copies that its optimizer updates, if there are any.
        says_reduce: Whether to name the format of sums over ranks.
    """
    formats = policy.describe()
    if not says_reduce:
        del formats["reduce"]
    if model is not None:
        trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
        params = _names_of(trained or frozen)
        formats["param"] = params + (f" (frozen ones {_names_of(frozen)})" if trained and frozen - trained else "")
        formats["master"] = "none" if masters is None else dtype_name(masters)
        if policy.param_dtype is None and policy.compute_dtype == torch.float32:
            formats["compute"] = params
    lines = ["precision  " + ", ".join(f"{name} {kept}" for name, kept in formats.items())]
    if policy.follows_model and model is None:
        lines.append("           a model in bf16 or fp16 is trained as under that name")
    return lines if policy.loss_scale is None else [*lines, f"           {policy.loss_scale}"]


def _names_of(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes))) or "none"


def check_device(asked: object, plugin: Plugin) -> torch.device | None:
    """Return the device that was asked for; ``None`` where none was.

    Raises:
        TypeError: If it is no device.
        ConfigError: If torch does not know it or does not have it, or the plugin does not run there.
    """
    if asked is None:
        return None
    is_class = isinstance(asked, type) and issubclass(asked, Plugin)
    if is_class or isinstance(asked, Plugin):
        kind = asked.__name__ if isinstance(asked, type) else type(asked).__name__
        what = f"the class `{kind}`, a plugin" if is_class else f"a `{kind}`, a plugin"
        msg = f"`device` is {what}. Did you mean `Booster(plugin={kind}(...))`? The device is the first argument."
        raise TypeError(msg)
    if not isinstance(asked, (str, int, torch.device)):
        msg = f"`device` is a device or its name, such as 'cpu'; got `{type(asked).__name__}`."
        raise TypeError(msg)
    try:
        device = torch.device(asked)
    except RuntimeError as cause:
        is_precision = asked in ("fp32", "bf16", "fp16", "pure-bf16")
        keyword = "plugin" if asked in names_of_plugins() else "mixed_precision" if is_precision else None
        if keyword is not None:
            kind = keyword.removeprefix("mixed_")
            own = f"`Booster({keyword}={asked!r})`"
            msg = f"`device={asked!r}` is the name of a {kind}, not a device. Did you mean {own}?"
        else:
            msg = f"`device={asked!r}` is not a device that torch knows. Use for example 'cpu' or 'cuda'."
        raise ConfigError(msg) from cause
    _check_present(asked, device)
    if not plugin.supports_device(device.type):
        msg = f"Plugin '{plugin.name}' does not run on device type '{device.type}'."
        raise ConfigError(msg)
    return device


def _check_present(asked: object, device: torch.device) -> None:
    """Raise where this machine lacks a device that torch knows by name."""
    if device.type in ("cpu", "meta"):
        return
    backend: Any = getattr(torch, device.type, None)
    is_there = backend.is_available() if hasattr(backend, "is_available") else _can_allocate(device)
    if not is_there:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        other = "the CPU" if here is None else f"the CPU and devices of type '{here.type}'"
        msg = (
            f"`device={asked!r}` needs a device of type '{device.type}', and torch {torch.__version__} sees none here. "
            f"It sees {other}. Use `device='{'cpu' if here is None else here.type}'`."
        )
        raise ConfigError(msg)
    if device.index is not None and hasattr(backend, "device_count") and device.index >= backend.device_count():
        msg = (
            f"`device={asked!r}` is not here: torch sees {backend.device_count()} device(s) of type '{device.type}', "
            f"'{device.type}:0' to '{device.type}:{backend.device_count() - 1}'."
        )
        raise ConfigError(msg)


def _can_allocate(device: torch.device) -> bool:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError):  # a build without the backend, or a backend without its library
        return False
    return True


def own_device(asked: torch.device | None, plugin: Plugin) -> torch.device:
    """Return the device of this process; of several devices that of its local rank, current since the launch.

    Raises:
        ConfigError: If that is not known yet, or the plugin does not run on the CPU and there is no other device.
    """
    if asked is None:
        kind = accelerator()
        asked = check_device(torch.device(kind if kind and plugin.supports_device(kind) else "cpu"), plugin)
        assert asked is not None, "a device was given"
    if asked.type != accelerator() or asked.index is not None:
        return asked
    num_started = 1 if torch.distributed.is_initialized() else detect().world_size
    if num_started > 1:
        msg = (
            f"A launcher started {num_started} processes, and which device is this one's is not known yet. Call "
            "`booster_core.launch()` before the device is used."
        )
        raise ConfigError(msg)
    return torch.device(asked.type, torch.accelerator.current_device_index())
