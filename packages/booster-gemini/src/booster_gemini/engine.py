"""`GeminiEngine`: chunks whose buffers are in several memories, and which memories a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import BudgetError, ConfigError
from booster_gemini.memory.chunks import ChunkMemory
from booster_gemini.memory.disk import DiskStore
from booster_gemini.plan import Placement
from booster_runtime.sharding import raised_on_all
from booster_zero.engine import Memory, Role, ShardedEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from booster_core.plugin import BoostContext
    from booster_gemini.config import GeminiConfig
    from booster_zero.engine import Format


class GeminiEngine(ShardedEngine):
    """Keeps the parameters of a model in chunks.

    Args:
        *args: As for `ShardedEngine`.
        chosen: Numbers of the parameters in leaves, of which each rank may use others. They are reduced when backward
            has ended: ranks would come to their reductions at different times among their gathers.
        **kwargs: As for `ShardedEngine`.

    Raises:
        ConfigError: If a parameter is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    def __init__(self, *args: Any, chosen: set[int], **kwargs: Any) -> None:
        self._chosen = chosen
        self._has_stepped = False
        super().__init__(*args, **kwargs)
        self.reducer.repeated = {*chosen}

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Let ranks agree on what the first round has shown; see `ShardedEngine.agree_on_record`.

        Collective: every rank of the world.
        """
        return super().agree_on_record(order, late) | self._chosen

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        The first step does not tell how much a budget must hold.

        Collective: every rank of the world, where blocks move; else none.
        """
        shortage: Exception | None = None
        try:
            self.memory.end_step()
        except BudgetError as caught:
            shortage = caught if self._has_stepped else None
        self._has_stepped = True
        self.raise_together(self.memory.problem() or shortage)


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

    Collective: every rank of the world, in step: an error on one is raised on all.
    """
    device, folder = context.device, config.offload_dir
    is_host = device.type == "cpu"
    if config.memory_budget_bytes is None and not config.offload_param_frac and not config.offload_optim_frac:
        return Memory()
    with raised_on_all("boost", device):
        if is_host and folder is None:
            msg = (
                "On CPU runs, disk is the only offload target, and `offload_dir=None` names none. Pass a folder on a "
                "disk with room for parameters and optimizer state, or leave out the options that move them."
            )
            raise ConfigError(msg)
        chunks = max(config.max_prefetch, 1)
        placement = Placement(
            away={
                Role.PARAM: config.offload_param_frac,
                Role.OPTIM: config.offload_optim_frac,
                # Gradients wait where the state is that they update; an accelerator hands them down when it steps.
                Role.GRAD: config.offload_optim_frac if is_host else 0.0,
            },
            # Of the state, which is larger, only one chunk's comes while another's is stepped on.
            ahead={Role.PARAM: 2 * chunks, Role.GRAD: chunks, Role.OPTIM: chunks},
            budget_bytes=config.memory_budget_bytes,
        )
        store = None if folder is None else DiskStore(folder)
        return ChunkMemory(device, placement, store, pins=config.pin_memory and not is_host)


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
