"""Track gradients that DDP has not averaged.

DDP's reducer averages the gradients of one backward after each synchronized forward. It does not see other gradients:
those of backward under ``no_sync``, of a second backward through one forward, or of backward through a method other
than ``forward``. Stepping with them makes the replicas diverge (https://github.com/pytorch/pytorch/issues/47260). A
hook on each parameter records them here, so that they are averaged before they are used.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import ConfigError, GradientError
from booster_ddp.averaging import average_gradients
from booster_runtime.data import hidden_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_core.plugin import BoostContext, ModelWrapper
    from booster_ddp.first_step import FirstStep
    from booster_ddp.rank_local import RankLocal


class UnreducedGradients:
    """Track the gradients of a model that have changed since they were last averaged.

    Args:
        model: The boosted model.
        context: Lets ranks wait for each other before averaging.
        bucket_bytes: Size of the buckets in which gradients are averaged.
        rank_local: Parameters that are not averaged.
        wire: The format in which they are sent and summed; ``None`` for their own.
        can_wait: The optimizer calls `average` before it uses the gradients. Without one, a backward that leaves
            gradients to be averaged raises.

    Attributes:
        exist: Whether there are such gradients. The same on every rank that makes the same calls, even if ranks use
            different parameters.
    """

    def __init__(
        self,
        model: ModelWrapper,
        context: BoostContext,
        *,
        bucket_bytes: int,
        rank_local: RankLocal,
        wire: torch.dtype | None,
        can_wait: bool,
    ) -> None:
        # The parameters' hooks reference this object, so it must not reference the parameters.
        self._model = weakref.ref(model)
        self._context = context
        self._bucket_bytes = bucket_bytes
        self._rank_local = rank_local
        self._wire = wire
        self._can_wait = can_wait
        self._is_reducer_ready = False
        self._searches = False
        self._marked: set[int] = set()  # ids of what the reducer has marked as used since it last finished
        self._task = -1
        self.exist = False
        self.first_step: FirstStep | None = None
        for parameter in self._reduced(model):
            parameter.register_post_accumulate_grad_hook(self._notice)  # type: ignore[no-untyped-call]

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Watch the reductions of a DDP model."""
        ddp.register_forward_hook(self._after_forward)
        if ddp.find_unused_parameters:
            self._searches = True
            ddp.register_forward_pre_hook(self._forget_marks)

    def check_finished(self) -> None:
        """Check that DDP's reducer has finished.

        Raises:
            GradientError: If it waits for gradients of parameters that the last backward did not use.
        """
        ddp = self._ddp() if self._is_reducer_ready else None
        if ddp is None:
            return
        try:
            ddp.reducer._check_reducer_finalized()  # noqa: SLF001 - there is no public way to ask
        except RuntimeError as cause:
            missing = [name for name, p in ddp.module.named_parameters() if p.grad is None and self._is_reduced(p)]
            which = f": {', '.join(map(repr, missing[:10]))}" if missing else ""
            msg = (
                f"{len(missing) or 'Some'} parameter(s) were used in an earlier step or under `no_sync` but not in "
                f"this backward, so DDP could not finish averaging{which}. Pass `find_unused_parameters=True` to the "
                "plugin, or run every forward and backward of the step under `booster.no_sync`; `optimizer.step()` "
                "then averages the gradients."
            )
            raise GradientError(msg) from cause

    def can_finish(self, num_inputs: int, num_reduced: int) -> bool:
        """Return whether DDP's reducer can finish, or needn't begin, if a backward is for some parameters only.

        Args:
            num_inputs: Number of parameters that get a gradient.
            num_reduced: Number of parameters whose gradients are averaged.
        """
        ddp = self._ddp() if self._is_reducer_ready else None
        if ddp is None or num_inputs == num_reduced:
            return True
        # It begins with the first gradient; with a static graph, at the outputs.
        return not num_inputs and not ddp.static_graph

    def average(self) -> list[int]:
        """Average all gradients over the ranks.

        Returns:
            For each parameter that is averaged, the number of ranks that had a gradient.

        Raises:
            MissingRanksError: If a rank does not call this, because it has no such gradients.

        Collective: every rank of the world.
        """
        model = self._model()
        assert model is not None, "the optimizer, which calls this, references it"
        # Else a rank that has run fewer backward passes would pair this all-reduce with those of its next backward.
        context = self._context
        context.coordinator.block_all(name="average gradients")
        counts = average_gradients(self._reduced(model), self._bucket_bytes, self._wire)
        self.exist = False
        return counts

    def _ddp(self) -> DistributedDataParallel | None:
        model = self._model()
        return model.module if model is not None and isinstance(model.module, DistributedDataParallel) else None

    def _reduced(self, model: ModelWrapper) -> list[nn.Parameter]:
        return [parameter for parameter in model.unwrap().parameters() if self._is_reduced(parameter)]

    def _is_reduced(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and parameter not in self._rank_local

    def _after_forward(self, ddp: Any, args: Any, output: Any) -> None:
        del args
        if (ddp.static_graph or ddp.find_unused_parameters) and torch.is_grad_enabled():
            _check_outputs(ddp, output)
        if ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_reducer_ready = True

    def _forget_marks(self, ddp: Any, args: Any) -> None:
        """Let the reducer forget which parameters earlier steps used, as it does itself where it finishes.

        It marks a parameter that gets a gradient, also under ``no_sync``, and fails in a later step that leaves the
        parameter out. Marks of gradients that are still to be averaged stay.
        """
        del args
        if not self._marked or not (ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            return
        if self.exist and any(p.grad is not None and id(p) in self._marked for p in ddp.module.parameters()):
            return
        try:
            ddp.reducer._check_reducer_finalized()  # noqa: SLF001
        except RuntimeError:
            return  # DDP's forward raises
        ddp.reducer._reset_state()  # noqa: SLF001
        self._marked.clear()

    def _notice(self, parameter: Tensor) -> None:
        """Check after this backward whether the reducer has finished; the hook of each parameter."""
        if self._searches:
            self._marked.add(id(parameter))
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as `torch.autograd.graph` identifies backward passes
        if task != self._task:
            self._task = task
            # The reducer finishes in a callback that the last gradient queues, so check in a later one.
            _call_after_backward(lambda: _call_after_backward(self._after_backward))

    def _after_backward(self) -> None:
        ddp = self._ddp() if self._is_reducer_ready else None
        if ddp is not None:
            try:
                ddp.reducer._check_reducer_finalized()  # noqa: SLF001
            except RuntimeError:
                return  # another backward may add the other gradients
            # The reducer has averaged every gradient, including what was accumulated before.
            self._is_reducer_ready = self.exist = False
            self._marked.clear()
            return
        self.exist = True
        if not self._can_wait:
            msg = (
                "DDP does not average the gradients of this backward: it is the second one through the same forward, "
                "or its loss was not computed by the boosted model's forward. Pass the optimizer to `boost` together "
                "with the model, so that its step averages them, or run one backward for each forward."
            )
            raise GradientError(msg)


def _check_outputs(ddp: DistributedDataParallel, output: Any) -> None:
    """Refuse outputs that DDP does not look into, from which it follows the graph or starts its first reduction.

    Raises:
        ConfigError: If there are some.
    """
    if any(tensor.requires_grad for tensor in hidden_tensors(output)) and (
        ddp.static_graph or not dataclasses.is_dataclass(output)
    ):
        option = "static_graph=True" if ddp.static_graph else "find_unused_parameters=True"
        msg = (
            f"The model returns a `{type(output).__name__}`, in which DDP finds no tensors. `{option}` needs them: "
            "without, gradients would not be averaged. Return tensors in a dict, list or tuple, or leave the option "
            "out."
        )
        raise ConfigError(msg)


def _call_after_backward(function: Any) -> None:
    Variable._execution_engine.queue_callback(function)  # noqa: SLF001 - as FSDP does
