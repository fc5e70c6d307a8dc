"""`ShardedGradients`: finishes the gradients of a sharded model, where torch's FSDP alone would leave them unfinished.

torch reduces the gradients of those parameters that have one on this rank, so ranks that used different parameters
would reduce different buffers. Before each reduction, missing gradients are therefore set to zero, and used parameters
are recorded, so that a parameter that no rank used ends without a gradient, as in one process. Gradients of replicated
parameters, and those that were accumulated under ``no_sync``, are reduced before they are read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError, GradientError
from booster_core.ranks import NamedCall
from booster_fsdp._torch_private import (
    drop_gradient,
    fill_gradients,
    gathered_of,
    groups_of,
    has_unreduced,
    reduce_accumulated,
    take_formats,
    unreduced_gradient,
    was_written,
)
from booster_fsdp.collectives import different_units
from booster_fsdp.parameters import gradient_of, watch_gradients
from booster_runtime import collectives
from booster_runtime.sharding import (
    AnyRankFlags,
    BufferWatch,
    parametrized_in_forward,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule

    from booster_core.plugin import BoostContext, GradientScaling


class UnitCalls:
    """Compares which units the ranks have run, forward and backward, since the last step.

    Ranks gather and reduce a unit's parameters together. If they run different units, torch takes the values of one for
    those of another where sizes agree, and otherwise waits for good.

    Args:
        units: The units by name, in the order of registration.
    """

    NUM_FLAGS = 16
    """Bytes of `flags`."""
    is_paused = False
    """Whether modules hold whole parameters, so that no unit may run."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._names = list(units)
        self._calls: list[int] = []  # the unit's number, and its complement for a backward
        for number, unit in enumerate(units.values()):
            # Not by torch's record of forwards, which ends with a backward.
            unit.register_forward_pre_hook(functools.partial(self._note, number), prepend=True)

    def _note(self, number: int, *unused: Any) -> None:
        del unused
        self.check_runs(self._names[number])
        self._calls.append(number)

    def check_runs(self, name: str) -> None:
        """Raise for a unit that runs where modules hold whole parameters.

        Raises:
            ConfigError: If they do.
        """
        if self.is_paused:
            msg = (
                f"{f'{name!r}' if name else 'The model'} ran inside of `whole_parameters`, where modules hold whole "
                "parameters, which it would gather itself. Run it outside of the block."
            )
            raise ConfigError(msg)

    def note_backward(self, number: int) -> None:
        """Record that a unit's gradients are complete."""
        self._calls.append(~number)

    def flags(self) -> bytes:
        """Return a digest of the calls and its complement: if ranks differ, so does some byte's maximum."""
        digest = hashlib.blake2b(repr(self._calls).encode(), digest_size=self.NUM_FLAGS // 2).digest()
        return digest + bytes(255 - each for each in digest)

    def check(self, most: bytes) -> None:
        """Raise if ranks have run different units, and begin with those of the next step.

        Args:
            most: The maximum over ranks of each byte of `flags`.

        Raises:
            ConfigError: If ranks differ.

        Collective: every rank of the world, if they differ; else none.
        """
        calls, self._calls = self._calls, []
        half = self.NUM_FLAGS // 2
        if all(high + low == 255 for high, low in zip(most[:half], most[half:], strict=True)):
            return
        of_ranks: list[list[int]] = collectives.all_gather_object(calls)
        by_call: list[tuple[int | None, ...]] = [*itertools.zip_longest(*of_ranks)]
        first = next(index for index, of_call in enumerate(by_call) if len(set(of_call)) > 1)
        told = ", ".join(f"{self._describe(each)} on rank {rank}" for rank, each in enumerate(by_call[first][:_SHOWN]))
        msg = f"since the last step, call {first + 1} was {told}, and values may have been mixed by now"
        raise different_units(msg)

    def _describe(self, call: int | None) -> str:
        if call is None:
            return "none"
        name = self._names[call if call >= 0 else ~call]
        return f"the {'forward' if call >= 0 else 'backward'} of {f'{name!r}' if name else 'the model'}"


_SHOWN = 4


class ShardedGradients:
    """Completes, reduces, averages and drops the gradients of one model, for all of its optimizers.

    Args:
        model: The user's model, sharded.
        units: The sharded modules by name in the order of registration, beginning with the model that torch sharded.
        device: Where the model runs.
        broadcast_buffers: Broadcast buffers that forward changes.
        writes: What `replace_parameters` has returned.
        refuse: Returns the error for a parameter's gradient, by name, where no optimizer would step with it; ``None``
            where there is one.

    Attributes:
        modules: The units.
        calls: Compares which units ranks have run.
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
        units: Mapping[str, FSDPModule],
        device: torch.device,
        *,
        broadcast_buffers: bool,
        writes: list[int],
        refuse: Callable[[str], Exception] | None = None,
    ) -> None:
        self.modules = list(units.values())
        self.num_updates, self._writes = 0, writes
        self.has_backward = False
        self.calls = UnitCalls(cast("Mapping[str, nn.Module]", units))
        self.notes: list[Callable[[], None]] = []
        self._units = [(module, group) for module in self.modules for group in groups_of(module)]
        self._parameters = list(model.parameters())
        self._keys = [id(parameter) for parameter in self._parameters]
        self._names = [name for name, _ in model.named_parameters()]
        self._replicated = [
            (number, each) for number, each in enumerate(self._parameters) if not isinstance(each, DTensor)
        ]
        # peft and torch set these to their own memory while forward runs, which counts as a write.
        self._excepted = {id(each) for module in parametrized_in_forward(model) for each in module.parameters()}
        self._device = device
        self._refuse = refuse
        self._used: set[int] = set()  # ids of the sharded parameters that had a gradient when they were reduced
        self._filled: set[int] = set()  # ids of those whose gradient on this rank is only the zeros of `_complete`
        self._unreduced: set[Any] = set()
        self._was_reduced = False
        self._buffers = BufferWatch(model) if broadcast_buffers else None
        self._changed_buffers: list[bool] = []
        self._stays_gathered = self._has_gathered = False
        for key, parameter in zip(self._keys, self._parameters, strict=True):
            if isinstance(parameter, DTensor):
                # torch's FSDP sets gradients itself; what comes here by autograd comes from uses of the shards.
                watch_gradients(parameter, functools.partial(self._note_used, key))
        for number, module in enumerate(self.modules):
            for group in groups_of(module):
                group.pre_backward = functools.partial(self._pre_backward, group.pre_backward)
                group.post_backward = functools.partial(self._post_backward, number, group, group.post_backward)

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
            ConfigError: If ranks have run different units.
            GradientError: If torch has not reduced some.

        Collective: every rank of the world, if there was a backward since the last call; else none.
        """
        self._reduce_rest()
        if not self.has_backward and not self._was_reduced:
            return
        self.has_backward = self._was_reduced = False
        flags = bytearray(map(self._used.__contains__, self._keys))
        for number, parameter in self._replicated:
            flags[number] = parameter.grad is not None
        flags += bytearray(self._buffers.changed() if self._buffers is not None else ())
        # Where ranks train other parameters, torch has reduced gradients of other sizes already.
        note = b"" if self.scaling is None else self.scaling.settings.note(self.scaling.groups, b"")
        anywhere = AnyRankFlags(flags + self.calls.flags() + note, self._device).wait()
        of_calls, of_settings = (
            anywhere[len(flags) :][: UnitCalls.NUM_FLAGS],
            anywhere[len(flags) + UnitCalls.NUM_FLAGS :],
        )
        self.calls.check(of_calls)
        if self.scaling is not None:
            self.scaling.settings.check(of_settings, (), self.context)
        used, of_buffers = anywhere[: len(self._keys)], anywhere[len(self._keys) : len(flags)]
        self._changed_buffers = [*map(bool, of_buffers)]
        for number in (number for number, is_used in enumerate(used) if not is_used):
            self._parameters[number].grad = None
        replicated = []
        for number, parameter in self._replicated:
            if used[number]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                replicated.append(parameter.grad)
        _average(replicated)

    @property
    def version(self) -> tuple[int, int]:
        """What changes with the values of the shards."""
        return self.num_updates, self._writes[0]

    def check_age(self, made_at: tuple[int, int], gradient: Tensor) -> None:
        """Raise if backward goes through a forward of older parameters; its outputs call this.

        Args:
            made_at: `version` in that forward.
            gradient: Not used.

        Raises:
            GradientError: If it does.
        """
        del gradient
        if self.version != made_at:
            msg = (
                "The parameters were modified by an inplace operation, such as `optimizer.step()` or loading a "
                "checkpoint, after the forward that this backward goes through, so its gradients would be wrong. Run "
                "backward before the step, or forward again after it."
            )
            raise GradientError(msg)

    def forget(self, parameters: set[int] | None = None) -> None:
        """Drop gradients that are not reduced yet, and the record of used parameters.

        Args:
            parameters: Ids of the sharded parameters; ``None`` for all.
        """
        self._note_unreduced()
        for _, group in self._units:
            group._partial_reduce_output = None  # noqa: SLF001 - HSDP's sums that are not averaged over replicas yet
        for group in self._unreduced:
            for inner in group.fsdp_params:
                if parameters is None or id(inner.sharded_param) in parameters:
                    drop_gradient(inner)
        if parameters is None:
            self._unreduced.clear()
        self._used = set() if parameters is None else self._used - parameters

    def _note_used(self, key: int, *unused: Any) -> None:
        """Record that a sharded parameter has a gradient that does not come from its unit."""
        del unused
        self._was_reduced = True
        self._used.add(key)
        self._filled.discard(key)

    # ---- after the step

    def note_update(self) -> None:
        """Record that shards have new values: backward through earlier graphs raises from now on."""
        self.num_updates += 1
        self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters: a forward without backward leaves some, and their values get old."""
        if self._stays_gathered:
            self.modules[0].set_reshard_after_backward(True)
            self._stays_gathered = False
        self._note_unreduced()
        for module, group in self._units:
            if group._all_gather_result is not None:  # noqa: SLF001 - begun ahead of a forward that has not come
                group.wait_for_unshard()
            if not group.is_sharded:
                module.reshard()

    def _note_unreduced(self) -> None:
        """Note gathered units with gradients: in outputs that torch can't look into, it does not see these units."""
        for _, group in self._units:
            if not group.is_sharded and has_unreduced(group):
                self._unreduced.add(group)

    def gather_once(self) -> None:
        """Let torch make what it gathers into, if it has not yet: made in inference mode, that could not be trained.

        Collective: every rank of the world, the first time.
        """
        if not self._has_gathered:
            with torch.inference_mode(mode=False), torch.no_grad():
                for module in self.modules:
                    module.unshard()
                    module.reshard()
            self._has_gathered = True

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

    def _pre_backward(self, gather: Any, *unused: Any) -> None:
        """Gather a unit, which stays gathered after a backward that records a graph, such as for a penalty.

        The backward of that graph needs what the unit holds.
        """
        if torch.is_grad_enabled() and not self._stays_gathered:
            self.modules[0].set_reshard_after_backward(False)
            self._stays_gathered = True
        gather(*unused)

    def _post_backward(self, number: int, group: Any, reduce: Any, *unused: Any) -> None:
        """Complete a unit's gradients, then let torch reduce them."""
        # Those of a unit that has never run are gathered into nothing.
        gathered = [(inner, whole) for inner in group.fsdp_params if (whole := gathered_of(inner)) is not None]
        for note in self.notes:
            note()
        if self._refuse is not None:
            for inner, whole in gathered:
                if unreduced_gradient(inner, whole) is not None:
                    raise self._refuse(inner._param_fqn)  # noqa: SLF001 - as in `_torch_private`
        elif group.reduce_grads:
            self._was_reduced = True
            self._unreduced.discard(group)
            self.calls.note_backward(number)
            self._complete(gathered)
        elif gathered:
            self._unreduced.add(group)
        # A unit that never ran has nothing to accumulate, and torch fails where it would convert that.
        if group.reduce_grads or gathered:
            take_formats(group)
            reduce(*unused)

    def _complete(self, gathered: Sequence[tuple[Any, Any]]) -> None:
        """Record the parameters of a unit that this rank has used, and give the others gradients of zero.

        Raises:
            ConfigError: If forward has written to a parameter: torch keeps only shards, so that the values are lost.
        """
        trained, is_complete = [], True
        for inner, whole in gathered:
            if was_written(inner, whole) and id(inner.sharded_param) not in self._excepted:
                msg = (
                    f"Parameter '{inner._param_fqn}' was changed during forward. FSDP drops that change, because it "  # noqa: SLF001
                    "keeps only shards. Change parameters after `optimizer.step()`, or keep the module whole by "
                    "`ignored_modules`."
                )
                raise ConfigError(msg)
            has_gradient = unreduced_gradient(inner, whole) is not None
            if not whole.requires_grad and not has_gradient:
                continue
            if has_gradient and whole.requires_grad and not inner.sharded_param.requires_grad:
                msg = (
                    f"Parameter '{inner._param_fqn}' was frozen after the forward that this backward goes through, "  # noqa: SLF001
                    "which would give it a gradient all the same. Freeze it before forward, or after backward."
                )
                raise GradientError(msg)
            trained.append((inner, whole))
            is_complete &= has_gradient
            key = id(inner.sharded_param)
            if has_gradient or (key not in self._filled and gradient_of(inner.sharded_param) is not None):
                self._used.add(key)
                self._filled.discard(key)
            else:
                self._filled.add(key)
        if not is_complete:
            fill_gradients(trained)

    def _reduce_rest(self) -> None:
        """Reduce gradients that torch has left: of ``no_sync``, and of graphs in which it does not see its units.

        Collective: every rank of the world, if there was such a backward since the last reduction; else none.
        """
        self._note_unreduced()
        if not self._unreduced:
            return
        groups = [group for _, group in self._units]
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
