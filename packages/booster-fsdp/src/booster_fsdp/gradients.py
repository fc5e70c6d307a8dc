"""`ShardedGradients`: finishes the gradients of a sharded model, where torch's FSDP alone would leave them unfinished.

torch reduces the gradients of those parameters that have one on this rank, so ranks that used different parameters
would reduce different buffers. Before each reduction, missing gradients are therefore set to zero, and used parameters
are recorded, so that a parameter that no rank used ends without a gradient, as in one process. Gradients of replicated
parameters, and those that were accumulated under ``no_sync``, are reduced before they are read.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster_core.errors import GradientError
from booster_core.ranks import NamedCall
from booster_fsdp._torch_private import (
    drop_gradient,
    fill_gradients,
    finish_gather,
    gradient_of,
    groups_of,
    has_gradients,
    reduce_accumulated,
    take_formats,
)
from booster_runtime import collectives
from booster_runtime.sharding import BufferWatch, RaisedAnywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule

    from booster_core.plugin import BoostContext, GradientScaling


class ShardedGradients:
    """Completes, reduces, averages and drops the gradients of one model, for all of its optimizers.

    Args:
        model: The user's model, sharded.
        modules: The sharded modules in the order of registration, beginning with the model that torch sharded.
        device: Where the model runs.
        broadcast_buffers: Broadcast buffers that forward changes.
        refuse: Returns the error for a parameter's gradient, by name, where no optimizer would step with it; ``None``
            where there is one.

    Attributes:
        modules: As given.
        num_updates: How often the shards have got new values by a step or by loading.
        has_backward: Whether backward has run since gradients were completed.
        scaling: What the boosted optimizers share, which set it, like the context; ``None`` where there are none.
        context: Of the ``boost``.
        notes: Called when backward has come to a unit with gradients.
    """

    scaling: GradientScaling | None = None
    context: BoostContext

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[FSDPModule],
        device: torch.device,
        *,
        broadcast_buffers: bool,
        refuse: Callable[[str], Exception] | None = None,
    ) -> None:
        self.modules = list(modules)
        self.num_updates = 0
        self.has_backward = False
        self.notes: list[Callable[[], None]] = []
        self._groups = [group for module in self.modules for group in groups_of(module)]
        self._parameters = list(model.parameters())
        self._device = device
        self._refuse = refuse
        self._used: set[int] = set()  # ids of the sharded parameters that had a gradient when they were reduced
        self._filled: set[int] = set()  # ids of those whose gradient on this rank is only the zeros of `_complete`
        self._unreduced: set[Any] = set()
        self._was_reduced = False
        self._buffers = BufferWatch(model) if broadcast_buffers else None
        self._changed_buffers: list[bool] = []
        for group in self._groups:
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)

    # ---- between forward and the step

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Let unsharded gradients accumulate on this rank during a ``with`` block."""
        root = self.modules[0]
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def settle(self) -> None:
        """Reduce the gradients of ``no_sync``, and average those of replicated parameters.

        A parameter that no rank used keeps no gradient.

        Raises:
            GradientError: If torch has not reduced some.

        Collective: every rank of the world, if there was a backward since the last call; else none.
        """
        self._reduce_rest()
        if not self.has_backward and not self._was_reduced:
            return
        self.has_backward = self._was_reduced = False
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        used = [id(p) in self._used if isinstance(p, DTensor) else p.grad is not None for p in trained]
        changed = self._buffers.changed() if self._buffers is not None else []
        # Where ranks train other parameters, torch has reduced gradients of other sizes already.
        note = b"" if self.scaling is None else self.scaling.settings.note(self.scaling.groups, b"")
        told = RaisedAnywhere(bytearray([*note, *used, *changed]), self._device).wait()
        if self.scaling is not None:
            self.scaling.settings.check(told[: len(note)], (), self.context)
        anywhere = [*map(bool, told[len(note) :])]
        self._changed_buffers = anywhere[len(trained) :]
        replicated = []
        for parameter, is_used in zip(trained, anywhere[: len(trained)], strict=True):
            if not is_used:
                parameter.grad = None
            elif not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                replicated.append(parameter.grad)
        _average(replicated)

    def forget(self, parameters: set[int] | None = None) -> None:
        """Drop gradients that are not reduced yet, and the record of used parameters.

        Args:
            parameters: Ids of the sharded parameters; ``None`` for all.
        """
        for group in self._groups:
            group._partial_reduce_output = None  # noqa: SLF001 - HSDP's sums that are not averaged over replicas yet
            for inner in group.fsdp_params:
                if parameters is None or id(inner.sharded_param) in parameters:
                    drop_gradient(inner)
        if parameters is None:
            self._unreduced.clear()
        self._used = set() if parameters is None else self._used - parameters

    # ---- after the step

    def note_update(self) -> None:
        """Record that shards have new values: backward through earlier graphs raises from now on."""
        self.num_updates += 1
        self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters: a forward without backward leaves some, and their values get old."""
        for group in self._groups:
            finish_gather(group)
        for module in self.modules:
            if not all(group.is_sharded for group in groups_of(module)):
                module.reshard()

    def send_buffers(self) -> None:
        """Broadcast rank 0's values of the buffers that had changed on any rank when gradients were completed.

        Collective: every rank of the world.
        """
        if self._buffers is None or not any(self._changed_buffers):
            return
        with NamedCall("sharing of buffers"):
            self._buffers.send_changed(self._changed_buffers)
        self._changed_buffers = []

    # ---- during backward

    def _post_backward(self, group: Any, reduce: Any, *unused: Any) -> None:
        """Complete a unit's gradients, then let torch reduce them."""
        gathered = [
            inner
            for inner in group.fsdp_params
            if hasattr(inner, "_unsharded_param")  # else its unit has never run
        ]
        for note in self.notes:
            note()
        if self._refuse is not None:
            name = next((inner._param_fqn for inner in gathered if gradient_of(inner) is not None), None)  # noqa: SLF001
            if name is not None:
                raise self._refuse(name)
        elif group.reduce_grads:
            self._was_reduced = True
            self._unreduced.discard(group)
            self._complete(gathered)
        elif gathered:
            self._unreduced.add(group)
        # A unit that never ran has nothing to accumulate, and torch fails where it would convert that.
        if group.reduce_grads or gathered:
            take_formats(group)
            reduce(*unused)

    def _complete(self, gathered: Sequence[Any]) -> None:
        trained = [inner for inner in gathered if inner._unsharded_param.requires_grad]  # noqa: SLF001
        for inner in trained:
            key = id(inner.sharded_param)
            if gradient_of(inner) is not None or (inner.sharded_param.grad is not None and key not in self._filled):
                self._used.add(key)
                self._filled.discard(key)
            else:
                self._filled.add(key)
        fill_gradients(trained)

    def _reduce_rest(self) -> None:
        """Reduce gradients that torch has left: of ``no_sync``, and of graphs in which it does not see its units.

        Collective: every rank of the world, if there was such a backward since the last reduction; else none.
        """
        # After a transform of torch.func, too, nothing has told torch that backward has come to a unit.
        self._unreduced.update(group for group in self._groups if has_gradients(group))
        if not self._unreduced:
            return
        before = [(group.reduce_grads, group.all_reduce_grads) for group in self._groups]
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = True
        try:
            reduce_accumulated(self.modules[0])
        finally:
            for group, (reduces, all_reduces) in zip(self._groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
        if self._unreduced:
            msg = (
                "torch has not reduced the gradients of the last backward. Call the boosted model itself, rather than "
                "a part of it."
            )
            raise GradientError(msg)


def _average(gradients: Sequence[Tensor]) -> None:
    """Average gradients over all ranks in place, in one collective for each dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, _), tensors in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in tensors])
        collectives.all_reduce(flat).wait()
        flat /= dist.get_world_size()
        parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
