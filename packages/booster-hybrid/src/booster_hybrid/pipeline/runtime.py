"""Running a schedule: forward and backward of one batch's microbatches through this rank's stages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.schedule import Action, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.pipeline.cut import StagedModel
    from booster_hybrid.pipeline.p2p import Link
    from booster_hybrid.pipeline.schedule import Schedule


class PipelineRun:
    """One batch on its way through the pipeline.

    Args:
        staged: The model, cut into stages.
        schedule: Who does what in which order.
        index: This rank's position in the pipeline.
        link: Messages to the other ranks.
        microbatches: Keyword arguments of the model's forward, for each part of the batch.
        weights: What each microbatch's loss counts; they add up to 1.
        criterion: Called with outputs and microbatch on the last stage; returns a scalar.
        backward: Called with tensors, their gradients (``None`` for a loss), and whether this is the rank's last
            backward of the batch; ``None`` evaluates.
        keeps_outputs: Whether the outputs of the last stage are kept.

    Attributes:
        losses: The weighted loss of each microbatch, on the rank of the last stage.
        outputs: The outputs of each microbatch, there.
    """

    def __init__(
        self,
        staged: StagedModel,
        schedule: Schedule,
        index: int,
        link: Link,
        microbatches: Sequence[Mapping[str, Any]],
        weights: Sequence[float],
        criterion: Callable[[Any, Any], Tensor],
        backward: Callable[[Sequence[Tensor], Sequence[Tensor | None], bool], None] | None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        self._staged, self._schedule, self._index, self._link = staged, schedule, index, link
        self._microbatches, self._weights, self._criterion = microbatches, weights, criterion
        self._backward, self._keeps_outputs = backward, keeps_outputs
        self._received: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._produced: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._local: dict[tuple[Work, int, int], dict[str, Tensor]] = {}
        self._inbox = {sender: self._messages_from(sender) for sender in range(schedule.placement.num_ranks)}
        self._arrived: dict[tuple[Work, int, int], dict[str, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}

    def run(self) -> None:
        """Do this rank's part of the batch.

        Collective: every rank of the pipeline.
        """
        actions = [action for action in self._schedule.actions(self._index) if self._is_due(action)]
        backwards = [action for action in actions if action.work is not Work.FORWARD]
        for action in actions:
            if action.work is Work.FORWARD:
                self._run_forward(action)
            else:
                self._run_backward(action, is_last=action == backwards[-1])
        self._link.finish()

    def _is_due(self, action: Action) -> bool:
        return self._backward is not None or action.work is Work.FORWARD

    def _run_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        batch = self._microbatches[microbatch]
        received = {} if stage == 0 else self._take(Work.FORWARD, stage - 1, microbatch)
        context = torch.no_grad() if self._backward is None else contextlib.nullcontext()
        with context, self._staged.activated(stage, received):
            outputs, payload = self._staged.run(batch)
            if stage == self._schedule.placement.num_stages - 1:
                loss = self._checked(self._criterion(outputs, batch)) * self._weights[microbatch]
                payload = {"": loss}
                self.losses[microbatch] = loss.detach()
                if self._keeps_outputs:
                    self.outputs[microbatch] = outputs
        if self._backward is not None:
            self._received[key], self._produced[key] = received, payload
        if stage < self._schedule.placement.num_stages - 1:
            self._give(Work.FORWARD, stage, microbatch, stage + 1, payload)

    def _run_backward(self, action: Action, *, is_last: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        received, produced = self._received.pop(key), self._produced.pop(key)
        if stage == self._schedule.placement.num_stages - 1:
            tensors, gradients = [produced[""]], [None]
        else:
            arrived = self._take(Work.BACKWARD, stage + 1, microbatch)
            names = [name for name in produced if name in arrived and produced[name].requires_grad]
            tensors = [produced[name] for name in names]
            gradients = [arrived[name] for name in names]  # type: ignore[misc]
        if self._backward is not None:
            with self._staged.activated(stage, received):  # layers that are computed anew ask for what was received
                self._backward(tensors, gradients, is_last)
        if stage > 0:
            answer = {name: tensor.grad for name, tensor in received.items() if tensor.grad is not None}
            self._give(Work.BACKWARD, stage, microbatch, stage - 1, answer)

    def _give(self, work: Work, stage: int, microbatch: int, to_stage: int, tensors: Mapping[str, Tensor]) -> None:
        to = self._schedule.placement.rank_of(to_stage)
        if to == self._index:
            self._local[work, stage, microbatch] = {
                name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()
            }
        else:
            self._link.send(tensors, to)

    def _take(self, work: Work, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Return what a stage has sent, after whatever its rank has sent before."""
        wanted = (work, stage, microbatch)
        sender = self._schedule.placement.rank_of(stage)
        if sender == self._index:
            return self._local.pop(wanted)
        while wanted not in self._arrived:
            self._arrived[self._inbox[sender].pop(0)] = self._link.receive(sender)
            if self._inbox[sender]:
                self._link.expect(sender)
        return self._arrived.pop(wanted)

    def _messages_from(self, sender: int) -> list[tuple[Work, int, int]]:
        """Return what another rank sends to this one, in its order."""
        placement = self._schedule.placement
        if sender == self._index:
            return []
        messages = []
        for action in self._schedule.actions(sender):
            if action.work is Work.BACKWARD_WEIGHT or not self._is_due(action):
                continue
            is_forward = action.work is Work.FORWARD
            to_stage = action.stage + 1 if is_forward else action.stage - 1
            if 0 <= to_stage < placement.num_stages and placement.rank_of(to_stage) == self._index:
                work = Work.FORWARD if is_forward else Work.BACKWARD
                messages.append((work, action.stage, action.microbatch))
        return messages

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"`{type(loss).__name__}`"
            msg = (
                f"The criterion must return a scalar tensor; it returned {found}. Reduce it, for example by `.mean()`."
            )
            raise ConfigError(msg)
        return loss.reshape(())
