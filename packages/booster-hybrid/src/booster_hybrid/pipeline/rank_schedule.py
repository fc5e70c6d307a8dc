"""`RankSchedule`: what one rank does and exchanges in a batch, worked out once for each schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_hybrid.pipeline.schedule import Action, ActionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_hybrid.pipeline.schedule import Schedule

Message = tuple[ActionKind, int, int]
"""What is sent: outputs of a forward, or gradients of a backward; by which stage, for which microbatch."""


class RankSchedule:
    """One rank's way through a schedule.

    Args:
        schedule: Who does what in which order.
        index: The rank's position in the pipeline.
        trains: Whether there is a backward.
        splits: Whether weight gradients are computed apart from those of inputs.

    Attributes:
        actions: What the rank does.
        last_backward: The place among them of its last backward; -1 without one.
    """

    def __init__(self, schedule: Schedule, index: int, *, trains: bool, splits: bool) -> None:
        self._schedule, self._index = schedule, index
        self._trains, self._splits = trains, splits
        self.actions = self._due(schedule.actions(index))
        backwards = [place for place, action in enumerate(self.actions) if action.work is not ActionKind.FORWARD]
        self.last_backward = backwards[-1] if backwards else -1
        ranks = range(schedule.placement.num_ranks)
        self._messages = {rank: self._messages_from(rank) for rank in ranks}
        self._places: dict[int, dict[Action, int]] = {}

    def messages_from(self, sender: int) -> Sequence[Message]:
        """Return what another rank sends to this one, in its order."""
        return self._messages[sender]

    def place_at(self, rank: int, message: Message, to_stage: int) -> int:
        """Return the place of what needs a message among all that a rank does.

        Args:
            rank: The receiver.
            message: The message.
            to_stage: The stage that it is for.
        """
        return self._place(rank, Action(self._work(message[0]), to_stage, message[2]))

    def place_of(self, rank: int, message: Message) -> int:
        """Return the place of what made a message among all that its sender does."""
        return self._place(rank, Action(self._work(message[0]), *message[1:]))

    def _place(self, rank: int, action: Action) -> int:
        places = self._places.get(rank)
        if places is None:
            places = {each: place for place, each in enumerate(self._schedule.actions(rank))}
            self._places[rank] = places
        return places[action]

    def _work(self, work: ActionKind) -> ActionKind:
        """Return the work of the schedule that goes forward or back through a stage."""
        return ActionKind.BACKWARD_INPUT if work is ActionKind.BACKWARD and self._schedule.is_split else work

    def _due(self, actions: Sequence[Action]) -> list[Action]:
        return [
            each
            for each in actions
            if each.work is ActionKind.FORWARD
            or (self._trains and (self._splits or each.work is not ActionKind.BACKWARD_WEIGHT))
        ]

    def _messages_from(self, sender: int) -> list[Message]:
        placement = self._schedule.placement
        messages: list[Message] = []
        if sender == self._index:
            return messages
        last = placement.num_stages - 1
        receiver = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        for action in self._due(self._schedule.actions(sender)):
            if action.work is ActionKind.BACKWARD_WEIGHT:
                continue
            is_forward = action.work is ActionKind.FORWARD
            to_stage = action.stage + 1 if is_forward else action.stage - 1
            if 0 <= to_stage <= last and receiver[to_stage] == self._index:
                messages.append(
                    (ActionKind.FORWARD if is_forward else ActionKind.BACKWARD, action.stage, action.microbatch)
                )
        return messages
