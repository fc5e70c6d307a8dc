"""Whole tensors of a boosted model, by name: read them, and change them in the middle of training.

DeepSpeed's ``GatheredParameters``, ``safe_get_full_optimizer_state``, ``safe_set_full_optimizer_state`` and
``safe_set_full_grad`` do the same for its ZeRO stages; here they rest on `StateAdapter` and `Plugin.full_gradient`, and
so work under every plugin.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.state import TensorMeta, TensorShard, byte_view, copy_part, copy_to_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core import Booster
    from booster_core.plugin import ModelWrapper
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter

_ALIGNMENT = 16
"""Bytes at whose multiples tensors begin, for any format."""

__all__ = ["assembled", "full_gradient", "full_state", "gathered", "set_full_gradient", "set_full_state", "sum_owned"]


@contextlib.contextmanager
def gathered(
    booster: Booster, model: nn.Module, names: Sequence[str], *, writes: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Give whole parameters and buffers of a boosted model to a ``with`` block, on every rank.

    Example::

        with gathered(booster, model, ["embed_tokens.weight"], writes=True) as tensors:
            tensors["embed_tokens.weight"][new_tokens] = 0.0

    Args:
        booster: Of the run.
        model: The boosted model.
        names: Names as in the user's own model; a tied tensor may be given by any of its names.
        writes: Take the values that rank 0's tensors have at the end of the block, where it ends without an error.
            Masters follow; gradients and the optimizer's other state stay.

    Yields:
        Copies by name, in the model's formats and on the run's device. A block with ``writes`` must not train.

    Raises:
        TypeError: If ``names`` is a string.
        ConfigError: If the model has no tensor of a name, or ranks ask for different names.

    Collective: every rank of the world, when the block begins, and with ``writes`` when it ends.
    """
    coordinator = booster.context.coordinator
    asked = _same_names(names, coordinator, "gathered")
    adapter = booster.state_adapter(model)
    first_names = {name: adapter.tied_names().get(name, name) for name in asked}
    keys = dict.fromkeys(first_names.values())
    tensors = _gather(adapter.model_shards(), list(keys), booster.device, coordinator)
    _check_found(asked, first_names, tensors, adapter.model_shards, coordinator)
    yield {name: tensors[first] for name, first in first_names.items()}
    if writes:
        metas = {key: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for key, tensor in tensors.items()}
        _send_values_of_first_rank(tensors.values(), coordinator)
        for shard in adapter.model_targets(metas):
            if shard.name in tensors:
                copy_part(tensors[shard.name], shard)
        adapter.finish_load(model=True, optimizer=False)


def full_state(booster: Booster, model: nn.Module, name: str, state: str) -> Tensor:
    """Return a tensor of a parameter's optimizer state, whole, on every rank.

    Args:
        booster: Of the run.
        model: The boosted model.
        name: The parameter's name in the user's own model.
        state: Name of the state, such as ``"exp_avg"``; ``"master"`` for the fp32 values of a run that keeps them.

    Raises:
        ConfigError: If the parameter has no such state (it has none before the first step), or ranks ask for different
            ones.

    Collective: every rank of the world.
    """
    tensor, _ = _state(booster, model, name, state, "full_state")
    return tensor


def set_full_state(booster: Booster, model: nn.Module, name: str, state: str, values: Tensor) -> None:
    """Replace a tensor of a parameter's optimizer state by rank 0's values. With ``"master"``, the parameter follows.

    Args:
        booster: Of the run.
        model: The boosted model.
        name: The parameter's name in the user's own model.
        state: As for `full_state`.
        values: In the shape of the whole state.

    Raises:
        ConfigError: As `full_state`, or if the shape is another.

    Collective: every rank of the world.
    """
    whole, adapter = _state(booster, model, name, state, "set_full_state")
    coordinator = booster.context.coordinator
    with coordinator.together("set_full_state"):
        if values.shape != whole.shape:
            msg = f"`values` has shape {tuple(values.shape)}; the state '{state}' of '{name}' has {tuple(whole.shape)}."
            raise ConfigError(msg)
    whole.copy_(values)
    _send_values_of_first_rank([whole], coordinator)
    for shard in adapter.optimizer_shards():
        if (shard.name, shard.state) == (adapter.tied_names().get(name, name), state):
            copy_part(whole, shard)
    adapter.finish_load(model=False, optimizer=True)


def full_gradient(booster: Booster, model: nn.Module, name: str) -> Tensor | None:
    """Return the whole gradient of a parameter, in the parameter's shape, from the ranks that hold its parts.

    Args:
        booster: Of the run.
        model: The boosted model.
        name: The parameter's name in the user's own model.

    Returns:
        A copy without loss scaling; ``None`` where the parameter has no gradient.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If the model has no parameter of this name.

    Collective: every rank of the plugin's mesh, in step.
    """
    boosted = booster.boosted_model(model, "full_gradient")
    path = _path_of(booster, boosted, name)
    return booster.plugin.full_gradient(boosted, path)


def _path_of(booster: Booster, model: ModelWrapper, name: str) -> str:
    """Return the path of a parameter by its name.

    Raises:
        ConfigError: If the model has none of this name.
    """
    paths: dict[str, str] = model.__dict__.setdefault("_parameter_paths", {})
    if name not in paths:  # adapters that were added since have names of their own
        paths.update(booster.plugin.parameter_paths(model))
    if name not in paths:
        close = difflib.get_close_matches(name, paths, n=1)
        msg = f"The model has no parameter named '{name}'." + (f" Did you mean '{close[0]}'?" if close else "")
        raise ConfigError(msg)
    return paths[name]


def set_full_gradient(booster: Booster, model: nn.Module, name: str, values: Tensor) -> None:
    """Replace a parameter's gradient by rank 0's values; read it by `full_gradient`.

    Call it between backward and the optimizer's step.

    Args:
        booster: Of the run.
        model: The boosted model.
        name: The parameter's name in the user's own model.
        values: The average over ranks, without loss scale, in the shape of the whole parameter.

    Raises:
        TypeError: If ``values`` is no tensor, on every rank.
        ConfigError: If the model has no parameter of the name, or it has no gradient now, ``values`` has another shape,
            ranks ask for different names, or the gradient is not the boosted optimizer's.
        PluginError: If the plugin does not support this.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    _same_names([name], coordinator, "set_full_gradient")
    boosted = booster.boosted_model(model, "set_full_gradient")
    whole = full_gradient(booster, boosted, name)
    with coordinator.together("set_full_gradient"):
        if not isinstance(values, torch.Tensor):
            msg = f"`values` is a tensor in the shape of '{name}'; got `{type(values).__name__}`."
            raise TypeError(msg)
        if whole is None:
            msg = (
                f"'{name}' has no gradient to replace. Call `set_full_gradient` between backward and "
                "`optimizer.step()`."
            )
            raise ConfigError(msg)
        if whole.is_sparse:
            msg = f"The gradient of '{name}' is sparse and can't be set. Build its module with `sparse=False`."
            raise ConfigError(msg)
        if values.shape != whole.shape:
            msg = f"`values` has shape {tuple(values.shape)}; the gradient of '{name}' {tuple(whole.shape)}."
            raise ConfigError(msg)
    whole = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).copy_(values)
    _send_values_of_first_rank([whole], coordinator)
    booster.plugin.set_full_gradient(boosted, _path_of(booster, boosted, name), whole)


def _state(booster: Booster, model: nn.Module, name: str, state: str, call: str) -> tuple[Tensor, StateAdapter]:
    coordinator = booster.context.coordinator
    _same_names([name, state], coordinator, call)
    adapter = booster.state_adapter(model)
    key = f"{adapter.tied_names().get(name, name)}/{state}"
    tensors = _gather(adapter.optimizer_shards(), [key], booster.device, coordinator)
    _check_found([f"{name}/{state}"], {f"{name}/{state}": key}, tensors, adapter.optimizer_shards, coordinator)
    return tensors[key], adapter


def _same_names(names: Sequence[str], coordinator: DistCoordinator, call: str) -> list[str]:
    """Return the names as a list, if every rank has the same."""
    if isinstance(names, str):
        msg = f"`names` is a list of names; got the string '{names}'. Pass ['{names}']."
        raise TypeError(msg)
    asked = list(names)
    coordinator.agree(call, asked)
    return asked


def _gather(
    shards: Iterable[TensorShard], keys: Sequence[str], device: torch.device, coordinator: DistCoordinator
) -> dict[str, Tensor]:
    """Return whole tensors by key, from the shards that ranks own; those that no rank has are left out."""
    wanted = frozenset(keys)
    # An adapter may move a shard elsewhere when it is asked for the next, so values are copied at once.
    own = [
        replace(shard, data=shard.data.detach().to(device, copy=True))
        for shard in shards
        if shard.key in wanted and shard.is_owner
    ]
    return dict(assembled(own, device, coordinator))


def assembled(
    shards: Iterable[TensorShard], device: torch.device, coordinator: DistCoordinator
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of which ranks have parts with its key, whole, one after the other and alike on every rank.

    Args:
        shards: The parts that this rank has; no two ranks have the same.
        device: Of the whole tensors.
        coordinator: Of the ranks.

    Raises:
        ConfigError: If the parts are not the tensor.

    Collective: every rank, for each tensor.
    """
    own, sizes = defaultdict[str, list[TensorShard]](list), Counter[tuple[str, tuple[int, ...], torch.dtype]]()
    for shard in shards:
        own[shard.key].append(shard)
    told = [(shard.key, shard.global_shape, shard.dtype, shard.numel) for held in own.values() for shard in held]
    for key, shape, dtype, numel in itertools.chain.from_iterable(coordinator.all_gather_object(told)):
        sizes[key, shape, dtype] += numel
    for (key, shape, dtype), numel in sizes.items():
        if numel != math.prod(shape):
            msg = f"Of '{key}', of shape {shape} and {dtype}, there are {numel} elements on all ranks together."
            raise ConfigError(msg)
        yield from sum_owned(own[key], {key: (shape, dtype)}, device).items()


def sum_owned(
    shards: Iterable[TensorShard],
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    rank: int | None = None,
) -> dict[str, Tensor]:
    """Return whole tensors by key, which travel as one buffer.

    Args:
        shards: The parts that this rank owns; each is used before the next is asked for.
        forms: Shape and format of each tensor, the same on every rank.
        device: Of the whole tensors.
        rank: The rank that gets them; others get tensors on the device ``meta``. ``None`` gives them to all.

    Collective: every rank of the world.
    """
    offsets, size = {}, 0
    for key, (shape, dtype) in forms.items():
        offsets[key] = size
        size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    # Each byte is set on one rank and zero on the others, so that a sum of bytes changes no value.
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    tensors = {
        key: buffer[offsets[key] : offsets[key] + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for key, (shape, dtype) in forms.items()
    }
    for shard in shards:
        copy_to_whole(shard, tensors[shard.key])
    if dist.is_initialized() and dist.get_world_size() > 1 and size:
        if rank is None:
            dist.all_reduce(buffer)
        else:
            dist.reduce(buffer, rank)
    if rank is None or not dist.is_initialized() or dist.get_rank() == rank:
        return tensors
    return {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in forms.items()}


def _check_found(
    asked: Sequence[str],
    keys: dict[str, str],
    tensors: dict[str, Tensor],
    shards: Callable[[], Iterable[TensorShard]],
    coordinator: DistCoordinator,
) -> None:
    missing = [name for name in asked if keys[name] not in tensors]
    if missing:  # on every rank alike
        listed = [shard.key for shard in shards()]
        known = sorted({name for of_rank in coordinator.all_gather_object(listed) for name in of_rank})
        close = difflib.get_close_matches(missing[0], known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        msg = f"Nothing is named '{missing[0]}' on any rank.{hint}"
        raise ConfigError(msg)


def _send_values_of_first_rank(tensors: Iterable[Tensor], coordinator: DistCoordinator) -> None:
    if coordinator.world_size > 1:
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(byte_view(tensor), src=0)
