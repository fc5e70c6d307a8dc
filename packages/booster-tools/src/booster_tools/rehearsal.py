"""What `verify`, plans and `find_batch_size` share: trainings that leave no trace on the one that follows."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from booster_core.plugin import Plugin

_DROPOUT_ATTRIBUTES = ("dropout", "drop_prob", "drop_path", "layerdrop", "drop_rate")


@runtime_checkable
class JoinsOthers(Protocol):
    """A plugin whose ranks train with those of other launches. It is not rehearsed, as these are not there."""

    def what_to_plan(self) -> str:
        """Return what can be rehearsed in its place, such as ``"its inner plugin 'ddp'"``."""


def check_trains_alone(plugin: Plugin) -> None:
    """Check that a plugin trains with nobody else than the ranks of this launch.

    Raises:
        ConfigError: If it waits for other launches.
    """
    if isinstance(plugin, JoinsOthers):
        msg = (
            f"Plugin '{plugin.name}' waits for the ranks of other launches, which a plan, a verification or a try of "
            f"one rank does not have. Use {plugin.what_to_plan()}."
        )
        raise ConfigError(msg)


def built(build: Callable[[], tuple[Any, ...]]) -> tuple[nn.Module, Optimizer]:
    """Return model and optimizer.

    Raises:
        ConfigError: If ``build`` returns something else.
    """
    made = build()
    kinds = (nn.Module, torch.optim.Optimizer)
    if not isinstance(made, tuple) or len(made) != 2 or not all(map(isinstance, made, kinds)):
        got = ", ".join(type(each).__name__ for each in made) if isinstance(made, tuple) else type(made).__name__
        msg = (
            f"`build` returns (model, optimizer); got `{got}`. A criterion is another function: "
            "`TrainingFunctions(build, batch, loss)`, or `--loss` of the command."
        )
        raise ConfigError(msg)
    return made[0], made[1]


def share_of(batch: Any, index: int, size: int) -> Any:
    """Return one of equal shares of a batch, cut along the first dimension of its tensors.

    Raises:
        ConfigError: If the tensors have not equally many samples, or these can't be shared evenly.
    """
    counts = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(counts) != 1 or next(iter(counts)) % size or not next(iter(counts)):
        found = ", ".join(map(str, sorted(counts))) or "no"
        msg = (
            f"A batch of {found} samples can't be shared evenly by {size} data parallel ranks. Pass tensors with one "
            f"entry per sample in their first dimension, and a multiple of {size} samples."
        )
        raise ConfigError(msg)
    length = next(iter(counts)) // size

    def cut(tensor: Tensor) -> Tensor:
        return tensor[index * length : (index + 1) * length] if tensor.dim() else tensor

    return pytree.tree_map_only(Tensor, cut, batch)


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the states of torch's, numpy's and Python's global generators back afterwards.

    Args:
        device: The device whose generator is kept, besides that of the host. No other device is initialized.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what scripts draw from
    try:
        host_only = device.type == "cpu"
        with torch.random.fork_rng([] if host_only else [device], device_type="cuda" if host_only else device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Set every dropout rate of modules and of their configs to 0 for the time of the context.

    Rates are found by type (``nn.Dropout``) and, on other modules and configs, by name.
    """
    changed: list[tuple[Any, str, float]] = []
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            holders = [module, getattr(module, "config", None)]
            for holder in holders:
                if holder is None or id(holder) in seen or not hasattr(holder, "__dict__"):
                    continue
                seen.add(id(holder))
                for name, value in list(vars(holder).items()):
                    is_rate = isinstance(value, float) and 0 < value <= 1
                    by_type = name == "p" and isinstance(holder, nn.modules.dropout._DropoutNd)  # noqa: SLF001 - the base of all
                    if is_rate and (by_type or any(word in name for word in _DROPOUT_ATTRIBUTES)):
                        changed.append((holder, name, value))
                        setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)


def without_step_hooks(booster: Booster, plugin: Plugin) -> Booster:
    """Return a Booster with the settings of another one and a plugin, whose steps no hook observes."""
    asked = booster.precision if plugin.precision is None else None  # what the plugin was asked for is not said twice
    second = Booster(booster.device, asked, plugin, device_placement=booster.device_placement)
    second.context = replace(second.context, hooks=_WithoutSteps(second.context.hooks))
    return second


class _WithoutSteps:
    """The hooks of a run but ``after_step``: the steps of copies are nobody's."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self.after_step = SimpleNamespace(get_hookimpls=tuple)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)
