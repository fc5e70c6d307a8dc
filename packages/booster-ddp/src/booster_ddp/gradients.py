"""Gradients that DDP has not averaged: which there are, and their average.

DDP's reducer averages the gradients of one backward after each synchronized forward. It does not see other gradients:
those of backward under ``no_sync``, of a second backward through one forward, of backward through a method other
than ``forward``, or of ``torch.autograd.grad``, which a script assigns. Stepping with them makes the replicas diverge
(https://github.com/pytorch/pytorch/issues/47260). A hook on each parameter tells of backward, and those that were
averaged carry a mark, so that all others are averaged before they are used.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import GradientError
from booster_ddp._torch_private import (
    flatten_dense_tensors,
    forget_used,
    graph_task,
    queue_callback,
    take_tensors,
    unfinished_reduction,
    unflatten_dense_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from booster_core.plugin import BoostContext
    from booster_ddp.model import DDPModel


_AVERAGED = "_booster_is_averaged"
"""Key in the ``__dict__`` of a gradient that is averaged; what a script assigns has none."""


class Reduction(enum.Enum):
    """What DDP's reducer is about; it is back at `NONE` once it has averaged every gradient."""

    NONE = enum.auto()
    ARMED = enum.auto()
    """It takes the gradients of the next backward."""
    BEGUN = enum.auto()
    """A backward has given it some; where that raises, this stays."""
    ENDED = enum.auto()
    """That backward has ended."""


class UnreducedGradients:
    """Track the gradients of a model that have changed since they were last averaged.

    The optimizers hold this, and through it the parameters; the boosted model holds the optimizers. So neither the
    model nor the hooks of parameters are held from here.

    Args:
        model: The boosted model.
        context: Lets ranks wait for each other before averaging.
        bucket_bytes: Size of the buckets in which gradients are averaged.
        communication_dtype: The format in which they are sent and summed; ``None`` for their own.
        can_wait: The optimizer calls `average` before it uses the gradients. Without one, a backward that leaves
            gradients to be averaged raises.

    Attributes:
        named: The parameters by name.
        trained: Those that are averaged.
        averages_at_end: Each backward of the step averages at its end: DDP searches, and several forwards came before
            the first backward, of which the search knows the last one alone; or the first step finds out whether all
            parameters are used. The same on every rank.
        has_reduced: Whether the present DDP has averaged gradients. The same on every rank.
        is_cut_off: Whether a backward that DDP was to average has not reached it: its hooks hang on nodes of the graph
            that torch replaces where a script gives parameters another format or device.
        some_unused: Whether a backward has used only some of the parameters on this rank, where DDP did not average it.
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
        self._of = weakref.ref(model)
        self._context = context
        self._bucket_bytes = bucket_bytes
        self._communication_dtype = communication_dtype
        self._can_wait = can_wait
        module = model.unwrap()
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # each rank keeps its own, as under DDP
        self.named = {name: each for name, each in module.named_parameters() if name not in ignored}
        self.trained: Mapping[str, nn.Parameter] = {}
        self._tracked: list[nn.Parameter] = []
        self._untracked = self.named
        self._seen = [-1, 0]  # the last backward, and of how many parameters it has given the gradients
        self._exist = False
        self.begin({}, averages_at_end=False)

    @property
    def model(self) -> DDPModel | None:
        """The boosted model; ``None`` where a script keeps its own model and the optimizer alone."""
        return self._of()

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        model = self._of()
        return None if model is None else model.ddp

    def begin(self, trained: Mapping[str, nn.Parameter], *, averages_at_end: bool) -> None:
        """Begin with a DDP that has not run, and watch the gradients of what is trained, for as long as this lives."""
        self._reduction = Reduction.NONE
        self._has_marks = False  # it remembers parameters of a backward that it did not average
        self._is_open = False  # no backward has come since the last forward
        self.averages_at_end = averages_at_end
        self._has_averaged = self.has_reduced = self.some_unused = self.is_cut_off = False
        self.trained = trained
        known = {id(parameter) for parameter in self._tracked}
        seen, own = self._seen, weakref.ref(self)  # which holds the parameters

        def notice(parameter: Tensor) -> None:
            """Note a backward by the gradients that it gives: as short as can be."""
            del parameter
            task = graph_task()
            if task != seen[0]:
                seen[0] = task
                if (tracker := own()) is not None:
                    tracker.begin_backward()
            seen[1] += 1

        self._untracked = {name: each for name, each in self._untracked.items() if name not in trained}
        for parameter in trained.values():
            if id(parameter) not in known:
                self._tracked.append(parameter)
                parameter.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]

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
            self.averages_at_end = True
            self._reduction = Reduction.NONE
            forget_used(ddp)
        ddp.require_backward_grad_sync = not (accumulates or self.averages_at_end)
        if not self._has_marks or not ddp.require_backward_grad_sync or self._unfinished() is not None:
            return
        if self._exist and any(parameter.grad is not None for parameter in self.trained.values()):
            return
        forget_used(ddp)
        self._has_marks = False

    def after_forward(self, ddp: DistributedDataParallel) -> None:
        """Note that DDP reduces the next backward, unless the forward was to leave it to the step."""
        self._is_open = True
        if ddp.require_backward_grad_sync:
            self._reduction = Reduction.ARMED

    def settle(self) -> None:
        """Average gradients that DDP has not: of ``no_sync``, a second backward through one forward, or assigned ones.

        Raises:
            GradientError: If DDP has averaged only some of the gradients, or a parameter that was frozen
                in each forward has one.

        Collective: every rank of the world if there are such gradients; else none.
        """
        self._check_finished()
        if self.exist or self._are_assigned:
            self.average()
        unknown = [name for name, each in self._untracked.items() if each.grad is not None]
        if unknown:
            msg = (
                f"{len(unknown)} parameter(s) that were frozen in each forward of the boosted model have gradients, "
                f"which DDP does not average: {', '.join(map(repr, unknown[:10]))}. Unfreeze them before the forward."
            )
            raise GradientError(msg)

    def _check_finished(self) -> None:
        """Check that DDP's reducer has finished.

        Raises:
            GradientError: If it waits for gradients of parameters that the last backward did not use, or that raised.
        """
        self._note_reduction()
        cause = self._unfinished()
        if cause is None:
            return
        if self._reduction is Reduction.BEGUN:
            msg = (
                "The last backward has raised, when DDP had averaged some of its gradients. Drop them by "
                "`optimizer.zero_grad()`, then go on with the next forward."
            )
            raise GradientError(msg)
        missing = [name for name, p in self.trained.items() if p.grad is None]
        which = f": {', '.join(map(repr, missing[:10]))}" if missing else ""
        # The search begins at the outputs: it can't know that the loss leaves out what they came of.
        ddp = self._ddp
        searches = ddp is not None and ddp.find_unused_parameters
        first = "Run" if searches else "Pass `find_unused_parameters=True` to the plugin, or run"
        msg = (
            f"{len(missing) or 'Some'} parameter(s) were used in forward, in an earlier step or under `no_sync`, but "
            f"not in this backward, so DDP could not finish averaging{which}. {first} every forward and backward of "
            "the step under `booster.no_sync`; `optimizer.step()` then averages the gradients."
        )
        raise GradientError(msg) from cause

    def is_given_up(self, *, accumulates: bool) -> bool:
        """Return, before a forward, whether DDP waits for gradients of the last backward, and it has been given up.

        Raises:
            GradientError: If it has raised, or left some out, and those that it gave have not been dropped.
        """
        if self._unfinished() is None:
            return False
        is_dropped = all(parameter.grad is None for parameter in self.trained.values())
        if not is_dropped and not accumulates:
            self._check_finished()
        return is_dropped

    def can_finish(self, num_inputs: int) -> bool:
        """Return whether DDP's reducer can finish, or needn't begin, where a backward is for this many parameters."""
        self._note_reduction()
        ddp, model = self._ddp, self.model
        if ddp is None or model is None or num_inputs == len(self.trained):
            return True
        # The first step takes what later ones can do.
        is_first = self.averages_at_end and not ddp.find_unused_parameters and not model.accumulates
        # DDP begins with the first gradient; with a static graph, at the outputs.
        return (self._reduction is Reduction.NONE and not is_first) or not (num_inputs or ddp.static_graph)

    def average(self) -> None:
        """Average all gradients over the ranks.

        Raises:
            MissingRanksError: If a rank does not call this, because it has no such gradients.

        Collective: every rank of the world.
        """
        # Else a rank that has run fewer backward passes would pair this all-reduce with those of its next backward.
        self._context.coordinator.block_all(name="average gradients")
        tracked = {id(parameter) for parameter in self._tracked}
        parameters = [each for each in self.named.values() if id(each) in tracked]  # in the same order on every rank
        average_gradients(parameters, self._bucket_bytes, self._communication_dtype)
        self._mark()
        self._exist = False
        self._has_averaged = True
        self._note_used()

    def end_step(self) -> bool:
        """Learn that a step has been taken, after which DDP averages again; return whether `average` was called."""
        has_averaged, self._has_averaged = self._has_averaged, False
        if has_averaged:
            self.averages_at_end = False
        return has_averaged

    @property
    def _are_assigned(self) -> bool:
        """Whether a script has assigned a gradient since they were averaged."""
        found = [each.grad for each in self._tracked if each.grad is not None and _AVERAGED not in each.grad.__dict__]
        return bool(found)

    def _mark(self) -> None:
        """Mark the gradients that there are as averaged."""
        for parameter in self._tracked:
            if (gradient := parameter.grad) is not None:
                gradient.__dict__[_AVERAGED] = True

    def _unfinished(self) -> RuntimeError | None:
        """Return torch's error if DDP's reducer has begun and waits for gradients."""
        ddp = self._ddp
        has_begun = self._reduction in (Reduction.BEGUN, Reduction.ENDED)
        return unfinished_reduction(ddp) if ddp is not None and has_begun else None

    def begin_backward(self) -> None:
        """Settle the backward before this one, and note whether DDP's reducer takes part in this one."""
        self._note_reduction()
        self._note_used()
        self._is_open = False
        if self._reduction is not Reduction.NONE:
            self._reduction = Reduction.BEGUN
            queue_callback(weakref.WeakMethod(self._check_reached))
            return
        self._note_unreduced()
        model = self.model
        if self.averages_at_end and not (model is not None and model.accumulates):
            queue_callback(weakref.WeakMethod(self.average))

    def _check_reached(self) -> None:
        """Note at the end of a backward, before DDP's own end of it, if none of its gradients has come to DDP."""
        ddp = self._ddp
        if self._reduction is Reduction.BEGUN:
            self._reduction = Reduction.ENDED
        queue_callback(weakref.WeakMethod(self._mark))  # after DDP's own end
        if ddp is None or (ddp.static_graph and not self.has_reduced):  # which begins after its first backward
            return
        if self._reduction is Reduction.ENDED and self._unfinished() is None:
            self._reduction = Reduction.NONE
            self.is_cut_off = True
            self._note_unreduced()

    def _note_unreduced(self) -> None:
        """Note that the present backward leaves gradients to be averaged."""
        self._exist = True
        ddp = self._ddp
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
        if self._reduction in (Reduction.BEGUN, Reduction.ENDED) and self._unfinished() is None:
            self._reduction = Reduction.NONE
            self._exist = self._has_marks = False
            self._seen[1] = 0
            self.has_reduced = True

    def _note_used(self) -> None:
        """Note whether the last backward used only some of the parameters."""
        if self._seen[1]:
            self.some_unused |= self._seen[1] < len(self.trained)
            self._seen[1] = 0


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
        for bucket in take_tensors(gradients, bucket_bytes):
            flat = flatten_dense_tensors(bucket)
            flat = (flat if communication_dtype is None else flat.to(communication_dtype)).div_(dist.get_world_size())
            dist.all_reduce(flat)
            for gradient, part in zip(bucket, unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(part)


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
