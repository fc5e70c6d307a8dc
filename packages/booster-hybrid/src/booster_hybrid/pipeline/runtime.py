"""Running a schedule: forward and backward of one batch's microbatches through this rank's stages, and a record of it.

`PipelineRecord` notes when a rank did what in each batch, as a trace that is written when the batch has ended. On
devices that work through queues the times are the device's own, taken by events in the queue, so that recording never
waits for it within a batch.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import BoosterError, ConfigError
from booster_hybrid.pipeline.absent import is_absent, refuse
from booster_hybrid.pipeline.label_means import CountedCriterion
from booster_hybrid.pipeline.schedule import Action, ActionKind
from booster_runtime.label_means import counting
from booster_runtime.trace import Trace

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_hybrid.pipeline.cut import StagedModel
    from booster_hybrid.pipeline.label_means import LabelMeans
    from booster_hybrid.pipeline.p2p import P2PChannel, SendHandle
    from booster_hybrid.pipeline.schedule import Schedule
    from booster_hybrid.pipeline.weight_gradients import PendingGradients, SplitBackward
    from booster_hybrid.random_streams import MicrobatchStreams
    from booster_hybrid.weight_reads import DirectWeightUses


class PipelineRecord:
    """Notes the times of one rank's actions.

    Args:
        folder: Where ``pipeline-rank0.trace.json`` and its like are written; made if it does not exist.
        rank: This rank, in the world.
        index: Its position in its pipeline.
        pipeline: Which of the world's pipelines it works in.
        device: The device that computes.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, index: int, pipeline: int, device: torch.device
    ) -> None:
        self._trace = Trace(Path(folder) / f"pipeline-rank{rank}.trace.json", rank=rank)
        self._place = {"pipeline": pipeline, "index": index}
        self._device = device
        self._number = 0
        self._began = 0.0
        self._origin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        """Note that a batch begins."""
        self._marks = []
        self._began = time.time()
        self._origin = self._mark()

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Note how long an action computes."""
        start = self._mark()
        try:
            yield
        finally:
            self._marks.append((action, start, self._mark()))

    def end(self, schedule: Schedule) -> None:
        """Note that the batch has ended, and write it.

        Args:
            schedule: What was done in which order.

        Collective: none; waits for the device.
        """
        end = self._began + self._seconds(self._mark())
        parts = {"stages": schedule.placement.num_stages, "microbatches": schedule.num_microbatches}
        about: dict[str, Any] = {"batch": self._number, **self._place, **parts}
        self._trace.slice("batches", f"batch {self._number}", self._began, end, **about)
        for action, start, stop in self._marks:
            times = self._began + self._seconds(start), self._began + self._seconds(stop)
            done = {"batch": self._number, "stage": action.stage, "microbatch": action.microbatch}
            self._trace.slice(f"stage {action.stage}", f"{action.work.value} {action.microbatch}", *times, **done)
        self._marks = []
        self._number += 1
        self._trace.flush()

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        """Return when a mark was made, since the batch began."""
        if isinstance(mark, float):
            seconds: float = mark - self._origin
        else:
            mark.synchronize()
            seconds = self._origin.elapsed_time(mark) / 1e3
        return round(seconds, 7)


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


_REASONS = {
    "more than one element of the written-to tensor": (
        "The forward writes into parameters of layers that another stage holds, as that of RWKV does when it changes "
        "between training and evaluation."
    ),
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "The forward changes in place what a layer of another stage has returned."
    ),
    "has been modified by an inplace operation": (
        "The forward writes in place to a parameter or value that the backward of another microbatch still needs."
    ),
}
"""What errors of torch mean in a stage: a parameter that is not here has no memory, what was received is a leaf."""


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
        backward: Called with tensors, their gradients (``None`` for a loss), and as ``is_last`` whether this is the
            rank's last backward of the batch; ``None`` evaluates.
        keeps_outputs: Whether the outputs of the last stage are kept.
        split: Lets weight gradients wait where the schedule splits backward; ``None`` computes them with the inputs'.
        record: Notes when what is done; ``None`` notes nothing.
        rank_schedule: This rank's way through the schedule, where it is known from a batch before.
        streams: Where each microbatch draws from; ``None`` leaves the generators alone.
        means: Divides means over labels; ``None`` leaves them those of microbatches.
        reads: Looks at what losses read; ``None`` for nobody.
        failed_alone: Returns whether another rank, with which this one computes its stages, has not failed as well.

    Attributes:
        losses: The weighted loss of each microbatch, on the rank of the last stage.
        outputs: The outputs of each microbatch, there.
        error: What went wrong on this rank, if anything; what is left of its work is not done then, but what others
            wait for is sent all the same.
        peak_live: The largest number of forwards whose activations were kept for backward at one time.
        loss_factor: What losses are multiplied by for backward, whose gradients are divided by it where they are
            reduced.
    """

    def __init__(
        self,
        staged: StagedModel,
        schedule: Schedule,
        index: int,
        link: P2PChannel,
        microbatches: Sequence[Mapping[str, Any]],
        weights: Sequence[float],
        criterion: Callable[[Any, Any], Tensor],
        backward: Callable[..., None] | None,
        *,
        keeps_outputs: bool = False,
        split: SplitBackward | None = None,
        record: PipelineRecord | None = None,
        rank_schedule: RankSchedule | None = None,
        streams: Sequence[MicrobatchStreams] | None = None,
        means: LabelMeans | None = None,
        reads: DirectWeightUses | None = None,
        failed_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._means, self._reads, self._failed_alone = means, reads, failed_alone
        self._staged, self._schedule, self._index, self._link = staged, schedule, index, link
        self._microbatches, self._weights, self._criterion = microbatches, weights, criterion
        self._backward, self._keeps_outputs = backward, keeps_outputs
        self._record, self._streams = record, streams
        self._split = split if backward is not None and schedule.is_split else None
        self._received: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._produced: dict[tuple[int, int], dict[str, Any]] = {}
        self._local: dict[tuple[ActionKind, int, int], dict[str, Tensor] | None] = {}
        self._rank_schedule = rank_schedule or RankSchedule(
            schedule, index, trains=backward is not None, splits=self._split is not None
        )
        ranks = range(schedule.placement.num_ranks)
        self._sent: dict[int, deque[tuple[int, SendHandle]]] = {rank: deque() for rank in ranks}
        self._inbox = {sender: deque(self._rank_schedule.messages_from(sender)) for sender in ranks}
        self._arrived: dict[tuple[ActionKind, int, int], dict[str, Tensor] | None] = {}
        self._pending: dict[tuple[int, int], PendingGradients] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.error: Exception | None = None
        self._has_failed = False
        self.peak_live = 0
        self.loss_factor = 1

    def fail(self, error: Exception | None) -> None:
        """Begin as a rank that has failed; without an error, because another one has."""
        self._has_failed, self.error = True, error

    def run(self) -> None:
        """Do this rank's part of the batch; look at `error` afterwards.

        Collective: every rank of the pipeline.
        """
        self._staged.enclose_calls()
        if self._record is not None:
            self._record.begin()
        for sender in self._inbox:
            self._expect_from(sender)
        for place, action in enumerate(self._rank_schedule.actions):
            is_last = place == self._rank_schedule.last_backward
            if action.work is ActionKind.FORWARD:
                self._run_forward(action)
            elif action.work is ActionKind.BACKWARD_WEIGHT:
                self._run_weights(action, is_last=is_last)
            else:
                self._run_backward(action, is_last=is_last)
        self._link.finish()
        if self._record is not None:
            self._record.end(self._schedule)

    def _during(self, action: Action) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._record is None else self._record.during(action)

    def _run_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        received = {} if stage == 0 else self._take(ActionKind.FORWARD, stage - 1, microbatch)
        payload = None
        with self._unless_failed(received), self._during(action):
            payload = self._forward(key, received or {})
        if stage < self._schedule.placement.num_stages - 1:
            self._give(ActionKind.FORWARD, stage, microbatch, stage + 1, payload)

    @contextlib.contextmanager
    def _unless_failed(self, arrived: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Note an error that comes up inside. The caller goes on with what it owes to others.

        It is raised at once if others wait for this rank in a collective of the stage: they end when this one does.
        """
        self._has_failed = self._has_failed or arrived is None
        try:
            yield
        except Exception as caught:
            error = explained(caught)
            if not self._has_failed and self._failed_alone():
                if error is caught:
                    raise
                raise error from caught
            self._has_failed, self.error = True, self.error or error

    def _forward(self, key: tuple[int, int], received: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Run a stage, and return what the next one gets; ``None`` after a failure."""
        if self._has_failed:
            return None
        stage, microbatch = key
        batch = self._microbatches[microbatch]
        context = torch.no_grad() if self._backward is None else contextlib.nullcontext()
        if self._split is not None:
            self._pending[key] = self._split.begin(stage)
        is_end = stage == self._schedule.placement.num_stages - 1
        if self._means is not None:
            self._means.begin(microbatch)
        with context, self._acting_for(key, received), counting(self._means if is_end else None):
            if self._reads is not None and is_end:
                self._reads.begin()
            outputs, payload = self._staged.run(batch)
            if is_end:
                loss = self._loss(outputs, batch, microbatch)
                payload = {"": loss * (self._weights[microbatch] * self.loss_factor)}
                self.losses[microbatch] = loss.detach() * self._weights[microbatch]
                if self._keeps_outputs:
                    self.outputs[microbatch] = outputs
        if self._backward is not None:
            self._received[key] = received
            # Backward begins at places in the graph: what was made there is freed when it has been sent.
            self._produced[key] = {
                name: tensor if is_end else torch.autograd.graph.get_gradient_edge(tensor)
                for name, tensor in payload.items()
                if is_end or tensor.requires_grad
            }
            self.peak_live = max(self.peak_live, len(self._produced.keys() | self._pending.keys()))
        return payload

    def _loss(self, outputs: Any, batch: Any, microbatch: int) -> Tensor:
        if self._streams is not None:
            self._streams[microbatch].begin_criterion()
        if self._reads is not None:
            self._reads.end()
        counted = contextlib.nullcontext() if self._means is None else CountedCriterion(self._means, outputs, batch)
        with self._staged.showing_absent_state(), counted:
            loss = self._checked(self._criterion(outputs, batch))
        if self._reads is not None:
            self._reads.check(loss)
        return loss

    @contextlib.contextmanager
    def _acting_for(self, key: tuple[int, int], received: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model act for a stage and a microbatch, in forward and where backward recomputes layers."""
        with contextlib.ExitStack() as stack:
            streams = None if self._streams is None else self._streams[key[1]]
            stack.enter_context(self._staged.activated(key[0], received, streams))
            if self._split is not None and key in self._pending:
                stack.enter_context(self._split.using(self._pending[key]))
            yield

    def _run_backward(self, action: Action, *, is_last: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        is_end = stage == self._schedule.placement.num_stages - 1
        arrived = {} if is_end else self._take(ActionKind.BACKWARD, stage + 1, microbatch)
        answer = None
        with self._unless_failed(arrived), self._during(action):
            answer = self._input_gradients(key, arrived or {}, is_end=is_end, is_last=is_last)
        if stage > 0:
            self._give(ActionKind.BACKWARD, stage, microbatch, stage - 1, None if self._has_failed else answer)

    def _input_gradients(
        self, key: tuple[int, int], arrived: Mapping[str, Tensor], *, is_end: bool, is_last: bool
    ) -> dict[str, Tensor]:
        """Run a stage's backward, and return what the stage before gets."""
        received, produced = self._received.pop(key, {}), self._produced.pop(key, {})
        assert self._backward is not None, "no backward is due in evaluation"
        if self._has_failed:
            self._backward([], [], is_last=is_last)  # the data parallel ranks go on
            return {}
        names = [name for name in produced if is_end or name in arrived]
        tensors = [produced[name] for name in names]
        gradients = [None if is_end else arrived[name] for name in names]
        pending = self._pending.get(key)
        with self._acting_for(key, received), contextlib.nullcontext() if pending is None else pending.opened():
            self._backward(tensors, gradients, is_last=is_last)
        return {name: tensor.grad for name, tensor in received.items() if tensor.grad is not None}

    def _run_weights(self, action: Action, *, is_last: bool) -> None:
        assert self._backward is not None, "no backward is due in evaluation"
        with self._unless_failed({}), self._during(action):
            pending = self._pending.pop((action.stage, action.microbatch), None)
            roots = [] if pending is None or self._has_failed else pending.roots()
            self._backward(roots, [torch.zeros_like(root) for root in roots], is_last=is_last)

    def _give(
        self, work: ActionKind, stage: int, microbatch: int, to_stage: int, tensors: Mapping[str, Tensor] | None
    ) -> None:
        to = self._schedule.placement.rank_of(to_stage)
        if to == self._index:
            self._local[work, stage, microbatch] = (
                None
                if tensors is None
                else {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
            )
        else:
            sent = self._link.send(tensors, to, (work, stage))
            place = self._rank_schedule.place_at(to, (work, stage, microbatch), to_stage)
            self._sent[to].append((place, sent))

    def _take(self, work: ActionKind, stage: int, microbatch: int) -> dict[str, Tensor] | None:
        """Return what a stage has sent, after whatever its rank has sent before; ``None`` where that has failed."""
        wanted = (work, stage, microbatch)
        sender = self._schedule.placement.rank_of(stage)
        if sender == self._index:
            return self._local.pop(wanted)
        while wanted not in self._arrived:
            message = self._inbox[sender].popleft()
            self._arrived[message] = self._link.receive(sender)
            self._release(sender, self._rank_schedule.place_of(sender, message))
            self._expect_from(sender)
        return self._arrived.pop(wanted)

    def _expect_from(self, sender: int) -> None:
        """Ask for the next message of a rank, so that it travels while this one computes."""
        if self._inbox[sender]:
            work, stage, _ = self._inbox[sender][0]
            self._link.expect(sender, (work, stage))

    def _release(self, to: int, place: int) -> None:
        """Let go of what a rank must have got by now, as it has come so far in its list of actions."""
        sent = self._sent[to]
        while sent and sent[0][0] <= place:
            self._link.release(sent.popleft()[1])

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"`{type(loss).__name__}`"
            msg = (
                f"The criterion must return a scalar tensor; it returned {found}. Reduce it, for example by `.mean()`."
            )
            raise ConfigError(msg)
        if is_absent(loss):
            refuse("the criterion", loss)
        return loss.reshape(())


def explained(error: Exception) -> Exception:
    """Return an error of torch as one that says what it means here; others as they are."""
    if isinstance(error, StopIteration):  # which would be taken for the end of the data
        place = traceback.extract_tb(error.__traceback__)[-1]
        ended = ConfigError(
            f"`{place.name}` ({place.filename}, line {place.lineno}) took the next of what had ended. In a pipeline, "
            "neither the model nor the criterion may raise StopIteration."
        )
        ended.__cause__ = error
        return ended
    reason = next((reason for text, reason in _REASONS.items() if text in str(error)), None)
    if not isinstance(error, RuntimeError) or isinstance(error, BoosterError) or reason is None:
        return error
    explained = ConfigError(f"{reason} Such a model can't be cut: use `pp_size=1`. ({error})")
    explained.__cause__ = error
    return explained
