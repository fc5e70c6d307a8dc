"""Making the memory that a configuration asks for: which memories there are, and who decides what is where."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError, PluginError
from booster_gemini.memory.copies import HostCopies
from booster_gemini.memory.disk import DiskStore
from booster_gemini.memory.free_memory import FreeMemory
from booster_gemini.memory.measured import MeasuredMemory
from booster_gemini.memory.record_file import MemoryRecord
from booster_gemini.memory.tiered import TieredMemory
from booster_gemini.memory.tiers import Tier
from booster_gemini.placement.auto import AutoPlacement
from booster_gemini.placement.policy import PlacementPolicy
from booster_gemini.placement.static import StaticPlacement
from booster_runtime.sharding import raised_on_all
from booster_zero.engine import Memory, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from booster_core.plugin import BoostContext
    from booster_core.ranks import DistCoordinator
    from booster_gemini.config import GeminiConfig
    from booster_zero.engine import Format

_CHUNKS_AT_ONCE = 3
"""One that is computed with, one that comes, one that goes."""

_AHEAD_PART = 4
"""The part of a budget that is for what is not needed yet: a quarter, so that it drives out nothing needed sooner."""

_STATES = 2
"""Elementwise states that an optimizer is taken to keep of each element, as Adam does."""


def make_memory(config: GeminiConfig, context: BoostContext) -> Memory:
    """Return the memory of a model's chunks.

    Args:
        config: Options.
        context: Device and ranks.

    Raises:
        ConfigError: If the memories that are asked for are not there.
        PluginError: If nobody knows a placement policy of the name.

    Collective: every rank of the world, in step: an error on one is raised on all.
    """
    with raised_on_all("boost", context.device):
        return _make(config, context)


def most_chunk_numel(config: GeminiConfig, formats: Iterable[Format], shard_size: int) -> int | None:
    """Return how many elements a chunk may have so that a budget holds what moving during computation needs.

    That is the state of three chunks, one that is stepped on, one that comes and one that goes, and three whole ones.

    Args:
        config: Options.
        formats: Formats of the model's parameters.
        shard_size: Ranks that share each chunk.

    Returns:
        ``None`` where no budget was given.
    """
    budget = config.memory_budget_bytes
    if budget is None:
        return None
    needed = 1
    for format_ in formats:
        working, master = format_.working.itemsize, format_.master.itemsize
        state = working + (master if format_.has_copy else 0)
        if format_.is_trained:
            state += (1 + _STATES) * master
        needed = max(needed, -(-state // shard_size) + (working if shard_size > 1 else 0))
    return max(budget // (_CHUNKS_AT_ONCE * needed), 1)


def max_ahead_bytes(config: GeminiConfig) -> int | None:
    """Return how much chunks that are gathered ahead of their use may take; ``None`` where no budget was given.

    Collective: none; every rank has the same budget.
    """
    return None if config.memory_budget_bytes is None else config.memory_budget_bytes // _AHEAD_PART


def _make(config: GeminiConfig, context: BoostContext) -> Memory:
    device = context.device
    budget = config.memory_budget_bytes
    moves = budget is not None or config.offload_param_frac > 0 or config.offload_optim_frac > 0
    is_measured = False
    if config.placement_policy != "static":
        moves = True
        is_measured = budget is None and device.type != "cpu" and FreeMemory.is_told(device)
        if budget is None and not is_measured and config.placement_policy == "auto":
            msg = (
                f"`placement_policy='auto'` needs a budget, and device type '{device.type}' does not tell how much "
                "memory is free and how much was in use at most. Pass `memory_budget_bytes`."
            )
            raise ConfigError(msg)
    if not moves and config.memory_record is None:
        return Memory()
    if moves and device.type == "cpu" and config.offload_dir is None:
        msg = (
            "On CPU runs, disk is the only offload target, and `offload_dir=None` names none. Pass a folder on a disk "
            "with room for parameters and optimizer state, or leave out the options that move them."
        )
        raise ConfigError(msg)
    policy = _policy(config, context)
    pins = config.pin_memory and device.type != "cpu"
    copies = None if device.type == "cpu" else HostCopies(device)
    tiers = [Tier(device, budget, copy_stream=None if copies is None else copies.up)]
    if device.type != "cpu":
        host_budget = config.host_budget_bytes
        if config.offload_dir is not None and host_budget is None:
            host_budget = 0
        tiers.append(Tier(torch.device("cpu"), host_budget, pins=pins))
    record = None
    if config.memory_record is not None:
        facts: dict[str, Any] = {"budget_bytes": budget, "policy": config.placement_policy}
        record = MemoryRecord(config.memory_record, context.coordinator.rank, facts, device)
    store = None if config.offload_dir is None else DiskStore(config.offload_dir)
    if is_measured:
        return MeasuredMemory(tiers, store, policy, record, copies, agree=partial(_least, context.coordinator))
    return TieredMemory(tiers, store, policy, record, copies)


def _least(coordinator: DistCoordinator, number: int) -> int:
    """Return the least of the ranks' numbers.

    Collective: every rank of the world.
    """
    numbers: list[int] = coordinator.all_gather_object(number)
    return min(numbers)


def _policy(config: GeminiConfig, context: BoostContext) -> PlacementPolicy:
    if config.placement_policy == "auto":
        return AutoPlacement()
    if config.placement_policy == "static":
        fractions = {
            Role.PARAM: config.offload_param_frac,
            Role.OPTIM: config.offload_optim_frac,
            # Gradients wait where the state is that they update; an accelerator hands them down when it steps.
            Role.GRAD: config.offload_optim_frac if context.device.type == "cpu" else 0.0,
        }
        chunks = max(config.max_prefetch, 1)
        # Of the state, which is larger, only one chunk's comes while another's is stepped on.
        ahead = {Role.PARAM: 2 * chunks, Role.GRAD: chunks, Role.OPTIM: chunks}
        return StaticPlacement(fractions, class_of=lambda key: key[1], ahead=ahead)
    found = context.hooks.placement_policy(name=config.placement_policy)
    if not isinstance(found, PlacementPolicy):
        told = "nobody answers the hook `placement_policy` for it" if found is None else f"the hook returned {found!r}"
        msg = (
            f"`placement_policy={config.placement_policy!r}` is neither 'static' nor 'auto', and {told}. Install or "
            "register what brings it; it is a `booster_gemini.placement.PlacementPolicy`."
        )
        raise PluginError(msg)
    return found
