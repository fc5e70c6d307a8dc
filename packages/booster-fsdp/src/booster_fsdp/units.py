"""Access the FSDP units of a model; only this module, `internals` and `forward_writes` use torch's private attributes.

torch reduces the gradients of those parameters that have one on this rank, so ranks that used different parameters
would reduce different buffers. Before each reduction, missing gradients are therefore set to zero, and used parameters
are recorded, so that a parameter that no rank used ends without a gradient, as in one process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import Variable

from booster_core.errors import GradientError
from booster_fsdp.forward_writes import ForwardWrites
from booster_fsdp.internals import (
    check_internals,
    drop_gradient,
    fill_gradients,
    gradient_of,
    groups_of,
    reduce_accumulated,
)
from booster_fsdp.outputs import refuse_stale_backward
from booster_runtime.data import hidden_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.distributed.fsdp import FSDPModule


class Units:
    """Access the units of one model.

    Args:
        modules: The sharded modules in the order of registration, including the model itself.

    Raises:
        ConfigError: If this version of torch is not as expected.

    Attributes:
        used: Ids of the sharded parameters that had a gradient when they were reduced, since `forget`.
        num_reductions: Number of reductions so far.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self.modules = list(modules)
        check_internals(self.modules)
        self.used: set[int] = set()
        self._filled: set[int] = set()  # ids of those whose gradient on this rank is only the zeros of `_complete`
        self.num_reductions = 0
        self._unreduced: set[Any] = set()
        self._num_updates = 0
        self._seen_versions = 0
        self._settle: Callable[[], None] | None = None
        self._task = -1
        self._writes = ForwardWrites(cast("Sequence[nn.Module]", self.modules))
        for state, group in self._states_and_groups():
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)
            group.pre_forward = functools.partial(self._pre_forward, group, group.pre_forward)
            group.post_forward = functools.partial(self._post_forward, state, group, group.post_forward)
        root = self.modules[0]
        if not any(True for _ in groups_of(root)):
            # Before torch's own hook, which starts a backward.
            cast("nn.Module", root).register_forward_hook(self._after_root, prepend=True)

    def note_update(self) -> None:
        """Record that shards have new values: backward through earlier graphs raises from now on."""
        self._num_updates += 1
        # Parameters that a forward without backward left gathered have old values.
        self.reshard()

    def notice_updates(self) -> None:
        """Detect whether shards have new values; for a model whose optimizer is not ours."""
        versions = sum(_version_of(group) for group in self._groups())
        if versions != self._seen_versions:
            self._seen_versions = versions
            self.note_update()

    def settle_each_backward(self, settle: Callable[[], None], whole: Iterable[nn.Parameter]) -> None:
        """Call a function at the end of each backward; for a model whose optimizer is not ours.

        Args:
            settle: The function.
            whole: Trained parameters that are replicated, and so belong to no unit.
        """
        self._settle = settle
        for parameter in whole:
            parameter.register_post_accumulate_grad_hook(self._await_end)  # type: ignore[no-untyped-call]

    def reduce_rest(self) -> None:
        """Reduce gradients that were accumulated under `no_sync`.

        Raises:
            GradientError: If torch has not reduced them.

        Collective: every rank of the world, if there was such a backward since the last reduction; else none.
        """
        if not self._unreduced:
            return
        groups = list(self._groups())
        before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = True
        try:
            reduce_accumulated(self.modules[0])
        finally:
            for group, (reduces, all_reduces) in zip(groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
        if self._unreduced:
            msg = (
                "torch has not reduced the gradients that were accumulated under `no_sync`. Call the boosted model "
                "itself, rather than a part of it."
            )
            raise GradientError(msg)

    def reshard(self) -> None:
        """Reshard all parameters: forward without backward leaves some gathered."""
        for module in self.modules:
            module.reshard()

    def forget(self, parameters: set[int] | None = None) -> None:
        """Drop gradients that are not reduced yet, and the record of used parameters.

        Args:
            parameters: Ids of the sharded parameters; ``None`` for all.
        """
        for group in self._groups():
            group._partial_reduce_output = None  # noqa: SLF001 - see the module's docstring; also below
            for inner in group.fsdp_params:
                if parameters is None or id(inner.sharded_param) in parameters:
                    drop_gradient(inner)
        if parameters is None:
            self._unreduced.clear()
        self.used = set() if parameters is None else self.used - parameters

    def take_parameters(self) -> None:
        """Tell torch about parameters that were registered in place of those it created."""
        # Where a user has asked for swapped parameters, torch takes others for a fault.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            for group in self._groups():
                for inner in group.fsdp_params:
                    inner.reset_sharded_param()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def _groups(self) -> Iterator[Any]:
        for _, group in self._states_and_groups():
            yield group

    def _states_and_groups(self) -> Iterator[tuple[Any, Any]]:
        for module in self.modules:
            for group in groups_of(module):
                yield module._get_fsdp_state(), group  # noqa: SLF001 - see the module's docstring

    def _pre_forward(self, group: Any, run: Any, *args: Any) -> Any:
        given = run(*args)
        self._writes.take(group)
        return given

    def _post_forward(self, state: Any, group: Any, run: Any, *args: Any) -> Any:
        self._writes.check(group)
        output = run(*args)
        # torch gathers a unit for backward by hooks on the tensors that it finds. Where it finds none, no gradient
        # would be reduced.
        hidden = hidden_tensors(output)
        if hidden:
            state._register_pre_backward_hook(hidden)  # noqa: SLF001
        refuse_stale_backward(output, lambda: (self._num_updates, _version_of(group)))
        return output

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if not torch.compiler.is_compiling():
            refuse_stale_backward(output, lambda: self._num_updates)

    def _post_backward(self, group: Any, reduce: Any, *unused: Any) -> None:
        """Complete a unit's gradients, then let torch reduce them."""
        has_run = any(hasattr(inner, "_unsharded_param") for inner in group.fsdp_params)
        if group.reduce_grads:
            self.num_reductions += 1
            self._unreduced.discard(group)
            self._complete(group)
        elif has_run:
            self._unreduced.add(group)
        if self._settle is not None:
            self._await_end()
        # A unit that never ran has nothing to accumulate, and torch fails where it would convert that.
        if group.reduce_grads or has_run:
            reduce(*unused)

    def _await_end(self, parameter: torch.Tensor | None = None) -> None:
        """Complete gradients at the end of this backward, after torch has finished it."""
        del parameter
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as `torch.autograd.graph` identifies backward passes
        if task not in (self._task, -1):
            self._task = task
            _call_after_backward(lambda: _call_after_backward(self._settle))

    def _complete(self, group: Any) -> None:
        gathered = [
            inner
            for inner in group.fsdp_params
            if hasattr(inner, "_unsharded_param") and inner._unsharded_param.requires_grad  # noqa: SLF001
        ]
        for inner in gathered:
            key = id(inner.sharded_param)
            if gradient_of(inner) is not None or (inner.sharded_param.grad is not None and key not in self._filled):
                self.used.add(key)
                self._filled.discard(key)
            else:
                self._filled.add(key)
        fill_gradients(gathered)


def _version_of(group: Any) -> int:
    """Return a number that changes with a unit's shards, except by our optimizer, which updates views of their rows."""
    return sum(inner.sharded_param._version for inner in group.fsdp_params)  # noqa: SLF001 - as autograd notices it


def _call_after_backward(function: Any) -> None:
    Variable._execution_engine.queue_callback(function)  # noqa: SLF001 - as FSDP does
