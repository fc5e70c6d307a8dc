"""Noticing gradients that DDP has not averaged.

DDP's reducer averages what one backward after each synchronised forward adds. It passes over whatever else reaches
``.grad``: backward under ``no_sync``, a second backward through one forward, backward through a method besides
``forward``. Steps with such gradients train the replicas apart (https://github.com/pytorch/pytorch/issues/47260). A
hook on each parameter notices them here, so that they can be averaged before they are used.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import GradientError
from booster_ddp.averaging import average_gradients

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_core.plugin import BoostContext, ModelWrapper


class UnreducedGradients:
    """The gradients of a model that were added to since they were last averaged.

    Args:
        model: The boosted model.
        context: Lets ranks meet before they average.
        bucket_bytes: Gradients are averaged in pieces of about this size.
        can_wait: Somebody calls `average` before the gradients are used. Where nobody does, the backward that leaves
            some raises.

    Attributes:
        exist: Whether there are any. Ranks that make the same calls have the same answer, whichever parameters they
            use.

    Collective: none.
    """

    def __init__(self, model: ModelWrapper, context: BoostContext, *, bucket_bytes: int, can_wait: bool) -> None:
        # Parameters hold this object by their hooks, so it must not hold them.
        self._model = weakref.ref(model)
        self._context = context
        self._bucket_bytes = bucket_bytes
        self._can_wait = can_wait
        self._is_reducer_ready = False
        self._task = -1
        self.exist = False
        for parameter in _trained(model):
            parameter.register_post_accumulate_grad_hook(self._notice)  # type: ignore[no-untyped-call]

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Notice what a DDP model reduces.

        Collective: none.
        """
        ddp.register_forward_hook(self._after_forward)

    def check_finished(self) -> None:
        """Check that DDP's reducer is not in the middle of a reduction.

        Raises:
            GradientError: If it waits for gradients of parameters that took no part in the last backward.

        Collective: none.
        """
        ddp = self._ddp() if self._is_reducer_ready else None
        if ddp is None:
            return
        try:
            ddp.reducer._check_reducer_finalized()  # noqa: SLF001 - the reducer has no other way to ask
        except RuntimeError as cause:
            missing = [name for name, p in ddp.module.named_parameters() if p.requires_grad and p.grad is None]
            which = f": {', '.join(map(repr, missing[:10]))}" if missing else ""
            msg = (
                f"{len(missing) or 'Some'} parameter(s) took part in an earlier step or under `no_sync` but not in "
                f"this backward, so DDP could not finish averaging{which}. Pass `find_unused_parameters=True` to the "
                "plugin, or run every backward of the step under `booster.no_sync`, forward included: the step "
                "averages."
            )
            raise GradientError(msg) from cause

    def average(self) -> list[int]:
        """Average all gradients over the ranks.

        Returns:
            For each trained parameter the number of ranks that had a gradient.

        Raises:
            MissingRanksError: If a rank has no gradients that are to be averaged, and goes on.

        Collective: every rank of the world.
        """
        model = self._model()
        assert model is not None, "the optimizer, which calls, holds it"
        # A rank that has run fewer backward passes would answer by the reductions of its next one.
        context = self._context
        context.coordinator.rendezvous("average gradients", context.timeout_seconds)
        counts = average_gradients(_trained(model), self._bucket_bytes)
        self.exist = False
        return counts

    def _ddp(self) -> DistributedDataParallel | None:
        model = self._model()
        return model.module if model is not None and isinstance(model.module, DistributedDataParallel) else None

    def _after_forward(self, ddp: Any, args: Any, output: Any) -> None:
        del args, output
        if ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_reducer_ready = True

    def _notice(self, parameter: Tensor) -> None:
        """Look, after this backward, at what the reducer made of it; called for each parameter that gets a gradient."""
        del parameter
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as `torch.autograd.graph` tells backward passes apart
        if task != self._task:
            self._task = task
            # The reducer finishes in a callback that is queued by the last gradient, so look in a later one.
            _call_after_backward(lambda: _call_after_backward(self._after_backward))

    def _after_backward(self) -> None:
        ddp = self._ddp() if self._is_reducer_ready else None
        if ddp is not None:
            try:
                ddp.reducer._check_reducer_finalized()  # noqa: SLF001
            except RuntimeError:
                return  # another backward may bring the rest
            # The reducer has averaged every gradient, with all that was added before.
            self._is_reducer_ready = self.exist = False
            return
        self.exist = True
        if not self._can_wait:
            msg = (
                "DDP does not average the gradients of this backward: it is the second one through one forward, or "
                "its loss was computed outside of the boosted model's forward. Pass the optimizer to `boost` together "
                "with the model, so that its step averages them, or run one backward for each forward."
            )
            raise GradientError(msg)


def _trained(model: ModelWrapper) -> list[nn.Parameter]:
    return [parameter for parameter in model.unwrap().parameters() if parameter.requires_grad]


def _call_after_backward(function: Any) -> None:
    Variable._execution_engine.queue_callback(function)  # noqa: SLF001 - as FSDP does
