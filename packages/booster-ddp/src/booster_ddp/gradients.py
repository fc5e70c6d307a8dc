"""Gradients that DDP has not averaged: which there are, and their average.

DDP's reducer averages the gradients of one backward after each synchronized forward. It does not see other gradients:
those of backward under ``no_sync``, of a second backward through one forward, or of backward through a method other
than ``forward``. Stepping with them makes the replicas diverge (https://github.com/pytorch/pytorch/issues/47260). A
hook on each parameter tells of them here, so that they are averaged before they are used.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import GradientError
from booster_ddp._torch_private import forget_used, graph_task, queue_callback, unfinished_reduction

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.hooks import RemovableHandle

    from booster_core.plugin import BoostContext
    from booster_ddp.model import DDPModel


class UnreducedGradients:
    """Track the gradients of a model that have changed since they were last averaged.

    Args:
        model: The boosted model.
        context: Lets ranks wait for each other before averaging.
        bucket_bytes: Size of the buckets in which gradients are averaged.
        communication_dtype: The format in which they are sent and summed; ``None`` for their own.
        can_wait: The optimizer calls `average` before it uses the gradients. Without one, a backward that leaves
            gradients to be averaged raises.

    Attributes:
        has_reduced: Whether the present DDP has averaged gradients. The same on every rank.
        is_cut_off: Whether a backward that DDP was to average has not reached it: its hooks hang on nodes of the graph
            that torch replaces where a script gives parameters another format or device.
        has_counted: Whether a step's gradients were averaged, by DDP or in the step. The same on every rank.
        some_unused: Whether a backward has used only some of the parameters on this rank; known of parameters whose
            uses are counted.
    """

    def __init__(
        self,
        model: DDPModel,
        context: BoostContext,
        *,
        bucket_bytes: int,
        communication_dtype: torch.dtype | None,
        can_wait: bool,
    ) -> None:
        # The parameters' hooks reference this object, so it must not reference the parameters.
        self._model = weakref.ref(model)
        self._context = context
        self._bucket_bytes = bucket_bytes
        self._communication_dtype = communication_dtype
        self._can_wait = can_wait
        self._tracked: set[int] = set()
        self._task = -1
        self._exist = False
        self._counting: list[RemovableHandle] = []
        self.begin()

    def begin(self) -> None:
        """Begin with a DDP that has not run."""
        for handle in self._counting:
            handle.remove()
        self._counting = []
        self._is_armed = False  # DDP's reducer takes the next gradients
        self._has_begun = False  # and a backward has given it some
        self._has_ended = False  # and that has not raised
        self._has_marks = False  # it remembers parameters of a backward that it did not average
        self._is_open = False  # no backward has come since the last forward
        # Several forwards came before the first backward, and the search knows of the last one alone: each backward of
        # the step averages at its end. As calls decide it, it is the same on every rank.
        self._follows_several = self._has_averaged = False
        self._used: set[int] = set()
        self.has_reduced = self.has_counted = self.some_unused = self.is_cut_off = False

    def track(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch the gradients of parameters that are trained now, for as long as they live."""
        for parameter in parameters:
            if id(parameter) not in self._tracked:
                self._tracked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._notice)  # type: ignore[no-untyped-call]

    def count_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Find out whether backward uses all of these parameters, until the next `begin`."""
        for parameter in parameters:
            self._counting.append(parameter.register_post_accumulate_grad_hook(self._note_use))  # type: ignore[no-untyped-call]

    @property
    def exist(self) -> bool:
        """Whether there are such gradients.

        The same on every rank that makes the same calls, even if ranks use different parameters.
        """
        self._note_reduction()
        return self._exist

    def before_forward(self, ddp: DistributedDataParallel, *, accumulates: bool) -> None:
        """Settle earlier backward passes before a forward that records a graph, and let DDP reduce its backward or not.

        DDP's search marks each parameter that gets a gradient, also under ``no_sync``, and forgets the marks where it
        finishes a reduction. In a later step that leaves the parameter out, torch would miss its gradient and raise.
        So marks are forgotten here, unless their gradients are still to be averaged.
        """
        self._note_reduction()
        if self._is_open and ddp.find_unused_parameters and self._can_wait and not accumulates:
            self._follows_several = True
            self._is_armed = False
            forget_used(ddp)
        ddp.require_backward_grad_sync = not (accumulates or self._follows_several)
        if not self._has_marks or not ddp.require_backward_grad_sync or self._unfinished() is not None:
            return
        model = self._model()
        assert model is not None, "its forward calls this"
        if self._exist and any(parameter.grad is not None for parameter in model.trained.values()):
            return
        forget_used(ddp)
        self._has_marks = False

    def after_forward(self, ddp: DistributedDataParallel) -> None:
        """Note that DDP reduces the next backward, unless the forward was to leave it to the step."""
        self._is_open = True
        if ddp.require_backward_grad_sync:
            self._is_armed, self._has_begun = True, False

    def check_finished(self) -> None:
        """Check that DDP's reducer has finished.

        Raises:
            GradientError: If it waits for gradients of parameters that the last backward did not use, or that raised.
        """
        self._note_reduction()
        cause = self._unfinished()
        if cause is None:
            return
        model = self._model()
        assert model is not None, "its DDP has been asked"
        self._check_ended()
        missing = [name for name, p in model.trained.items() if p.grad is None]
        which = f": {', '.join(map(repr, missing[:10]))}" if missing else ""
        # The search begins at the outputs: it can't know that the loss leaves out what they came of.
        searches = model.ddp is not None and model.ddp.find_unused_parameters
        first = "Run" if searches else "Pass `find_unused_parameters=True` to the plugin, or run"
        msg = (
            f"{len(missing) or 'Some'} parameter(s) were used in forward, in an earlier step or under `no_sync`, but "
            f"not in this backward, so DDP could not finish averaging{which}. {first} every forward and backward of "
            "the step under `booster.no_sync`; `optimizer.step()` then averages the gradients."
        )
        raise GradientError(msg) from cause

    def is_given_up(self) -> bool:
        """Return, before a forward, whether DDP waits for gradients of the last backward, and it has been given up.

        Raises:
            GradientError: If it has raised, or left some out, and those that it gave have not been dropped.
        """
        model = self._model()
        if model is None or self._unfinished() is None:
            return False
        is_dropped = all(parameter.grad is None for parameter in model.trained.values())
        if not is_dropped and not model.accumulates:
            self.check_finished()
        return is_dropped

    def _check_ended(self) -> None:
        if not self._has_ended:
            msg = (
                "The last backward has raised, when DDP had averaged some of its gradients. Drop them by "
                "`optimizer.zero_grad()`, then go on with the next forward."
            )
            raise GradientError(msg)

    def can_finish(self, num_inputs: int, num_trained: int) -> bool:
        """Return whether DDP's reducer can finish, or needn't begin, if a backward is for some parameters only.

        Args:
            num_inputs: Number of parameters that get a gradient.
            num_trained: Number of parameters whose gradients are averaged.
        """
        self._note_reduction()
        ddp = self._ddp()
        if ddp is None or not self._is_armed or num_inputs == num_trained:
            return True
        # It begins with the first gradient; with a static graph, at the outputs.
        return not num_inputs and not ddp.static_graph

    def average(self) -> None:
        """Average all gradients over the ranks.

        Raises:
            MissingRanksError: If a rank does not call this, because it has no such gradients.

        Collective: every rank of the world.
        """
        model = self._model()
        assert model is not None, "the caller references it"
        # Else a rank that has run fewer backward passes would pair this all-reduce with those of its next backward.
        self._context.coordinator.block_all(name="average gradients")
        tracked = [parameter for parameter in model.unwrap().parameters() if id(parameter) in self._tracked]
        average_gradients(tracked, self._bucket_bytes, self._communication_dtype)
        self._exist = False
        self._has_averaged = self.has_counted = True
        self._count_unused()

    def end_step(self) -> None:
        """Learn that a step has been taken, after which DDP averages again."""
        if self._has_averaged:
            self._follows_several = self._has_averaged = False

    def _ddp(self) -> DistributedDataParallel | None:
        model = self._model()
        return None if model is None else model.ddp

    def _unfinished(self) -> RuntimeError | None:
        """Return torch's error if DDP's reducer has begun and waits for gradients."""
        ddp = self._ddp()
        return unfinished_reduction(ddp) if ddp is not None and self._is_armed and self._has_begun else None

    def _notice(self, parameter: Tensor) -> None:
        """Note a backward by the gradients that it gives: the hook of each parameter, and as short as can be."""
        del parameter
        task = graph_task()
        if task != self._task:
            self._task = task
            self._begin_backward()

    def _note_use(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _begin_backward(self) -> None:
        """Settle the backward before this one, and note whether DDP's reducer takes part in this one."""
        self._note_reduction()
        self._is_open = False
        if self._used:
            self._count_unused()
        if self._is_armed:
            self._has_begun, self._has_ended = True, False
            queue_callback(weakref.WeakMethod(self._check_reached))
            return
        self._note_unreduced()
        model = self._model()
        if self._follows_several and model is not None and not model.accumulates:
            queue_callback(weakref.WeakMethod(self.average))

    def _check_reached(self) -> None:
        """Note at the end of a backward, before DDP's own end of it, if none of its gradients has come to DDP."""
        self._has_ended = True
        ddp = self._ddp()
        if ddp is None or (ddp.static_graph and not self.has_reduced):  # which begins after its first backward
            return
        if self._is_armed and self._has_begun and self._unfinished() is None:
            self._is_armed = self._has_begun = False
            self.is_cut_off = True
            self._note_unreduced()

    def _note_unreduced(self) -> None:
        """Note that the present backward leaves gradients to be averaged."""
        self._exist = True
        ddp = self._ddp()
        self._has_marks = ddp is not None and ddp.find_unused_parameters
        if not self._can_wait:
            msg = (
                "DDP does not average the gradients of this backward: it is the second one through the same forward, "
                "its loss was not computed by the boosted model's forward, or the parameters have been moved or cast "
                "since `boost`. Pass the optimizer to `boost` together with the model, so that its step averages them, "
                "or run one backward for each forward, and move and cast before `boost`."
            )
            raise GradientError(msg)

    def _note_reduction(self) -> None:
        """Note if DDP's reducer has finished: then it has averaged every gradient, also what was accumulated before."""
        if not (self._is_armed and self._has_begun) or self._unfinished() is not None:
            return
        self._is_armed = self._has_begun = self._exist = self._has_marks = False
        self.has_reduced = self.has_counted = True
        self._count_unused()

    def _count_unused(self) -> None:
        """Note whether the last backward used only some of the parameters."""
        model = self._model()
        if self._counting and model is not None:
            self.some_unused |= len(self._used) < len(model.trained)
            self._used.clear()


def average_gradients(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, communication_dtype: torch.dtype | None = None
) -> None:
    """Average gradients over all ranks in place.

    A parameter that a rank did not use counts as zero there, as under DDP; a parameter that no rank used keeps no
    gradient. Gradients that were averaged before keep their values; only what ranks have added since is averaged.

    Args:
        parameters: The parameters, the same on every rank.
        bucket_bytes: Size of the buckets in which gradients are averaged.
        communication_dtype: The format in which dense gradients are sent and summed, as torch's compression hooks do;
            ``None`` for their own.

    Collective: every rank of the world.
    """
    users = [[p.grad is not None, p.grad is not None and p.grad.is_sparse] for p in parameters]
    num_users = torch.tensor(users, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(num_users)
    gradients = []
    with torch.no_grad():
        for parameter, (count, num_sparse) in zip(parameters, num_users.tolist(), strict=True):
            if not count:
                continue
            if num_sparse == count:
                parameter.grad = _averaged_sparse(parameter)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # another rank has a dense one
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
        _average(gradients, bucket_bytes, communication_dtype)


def _averaged_sparse(parameter: nn.Parameter) -> Tensor:
    """Return the average over all ranks of a gradient that is sparse on each rank that has one.

    It is reduced by itself, as in DDP's reducer.
    """
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    averaged = (gradient / dist.get_world_size()).coalesce()
    dist.all_reduce(averaged)
    return averaged


def _average(gradients: Sequence[Tensor], bucket_bytes: int, communication_dtype: torch.dtype | None) -> None:
    """Average gradients over all ranks in place, in buckets of one dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        num_bytes = 0
        for gradient in same_dtype:
            bucket.append(gradient)
            num_bytes += gradient.numel() * gradient.element_size()
            if num_bytes >= bucket_bytes:
                _average_bucket(bucket, communication_dtype)
                bucket, num_bytes = [], 0
        _average_bucket(bucket, communication_dtype)


def _average_bucket(bucket: Sequence[Tensor], communication_dtype: torch.dtype | None) -> None:
    if not bucket:
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    flat = (flat if communication_dtype is None else flat.to(communication_dtype)).div_(dist.get_world_size())
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in bucket]
    parts: Sequence[Tensor] = flat.split(sizes)  # type: ignore[no-untyped-call]
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
