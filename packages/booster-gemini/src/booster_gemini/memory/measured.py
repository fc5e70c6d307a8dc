"""A memory that finds its budget itself: the first step shows what else a device's memory has to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import BudgetError, ConfigError, OffloadError
from booster_gemini.memory.free_memory import FreeMemory
from booster_gemini.memory.tiered import TieredMemory
from booster_zero.engine import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_gemini.memory.block import Block

_FIRST_PART = 5
"""In the first step, blocks may take one part in so many of the device's memory, as with Colossal-AI's Gemini."""


class MeasuredMemory(TieredMemory):
    """Keeps blocks within what activations leave of a device's memory.

    The first step gets by with a fifth of the memory, and what everything else takes meanwhile is measured. From then
    on blocks may take the rest, on every rank what the fullest has left.

    Args:
        *args: As for `TieredMemory`.
        agree: Returns the least of the ranks' numbers. Collective: every rank of the world.
        **kwargs: As for `TieredMemory`.
    """

    def __init__(self, *args: Any, agree: Callable[[int], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = self.tiers[0].device
        self._agree = agree
        self._memory: FreeMemory | None = FreeMemory(device)
        self._is_running = False
        self.tiers[0].budget_bytes = self._memory.reachable_bytes // _FIRST_PART

    def moment(self, name: str) -> None:
        """Say what the model is doing; see `Memory.moment`. What took memory before it ran is over."""
        super().moment(name)
        if self._memory is not None and not self._is_running:
            self._is_running = True
            self._memory.begin()
            self.tiers[0].peak_bytes = self.tiers[0].used_bytes

    def end_step(self) -> None:
        """Make a plan for the next step, after the first one within what that has left.

        Raises:
            ConfigError: If what is left can't hold what was in use at once.

        Collective: every rank of the world after the first step; none after later ones.
        """
        memory, self._memory = self._memory, None
        tier = self.tiers[0]
        if memory is not None:
            tier.budget_bytes = max(self._agree(memory.left_bytes(tier.peak_bytes)), 0)
            self._raise_state()
        try:
            super().end_step()
        except BudgetError as error:
            msg = (
                f"Without `memory_budget_bytes`, the first step found {tier.budget_bytes} bytes left by activations on "
                f"{tier.device}, and {error.moment or 'a step'} needs {error.least_bytes} at once. Pass smaller "
                "batches, checkpoint activations, choose smaller chunks, or pass `memory_budget_bytes`."
            )
            raise ConfigError(msg) from error

    def _raise_state(self) -> None:
        """Let state be used on the device, as far as the budget holds it, that had no room there in the first step."""
        device = self.tiers[0]
        assert device.budget_bytes is not None, "set before this is asked for"
        held = sum(block.num_bytes for block in self._blocks.values() if block.tier is device)
        for key, block in self._blocks.items():
            if key[1] is Role.OPTIM and block.tier is not device and held + block.num_bytes <= device.budget_bytes:
                held += block.num_bytes
                try:
                    self._raise(block)
                except OffloadError as error:  # of the disk; others end the step, and then every rank is told
                    self._problem = self._problem or error
                    return

    def _raise(self, block: Block) -> None:
        """Bring a block, which is not in use, to the device for good; its bytes on the host stay its place there."""
        if block.going is not None:
            self._take_back(block)
        if not block.is_here:
            self._bring(block)
        self._arrive(block)
        self._unbind(block)
        block.tier, block.below, block.buffer, block.is_saved = self.tiers[0], block.buffer, None, True
        self._bring(block)
        self._arrive(block)
