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
from booster_core.plugin import sum_of_bits
from booster_core.ranks import NamedCall
from booster_core.state import compiled_module
from booster_fsdp._torch_private import (
    drop_gradient,
    fill_gradients,
    forget_gathered,
    forget_interrupted,
    gathered_of,
    gathered_units,
    graph_task,
    groups_of,
    has_unreduced,
    in_transform,
    is_in_backward,
    leave_alone,
    not_compiled,
    reduce_accumulated,
    states_of,
    take_formats,
    trained_of,
    unreduced_gradient,
    was_interrupted,
    was_written,
)
from booster_fsdp.collectives import check_trained, different_units
from booster_fsdp.parameters import gradient_of, watch_gradients
from booster_runtime import collectives
from booster_runtime.sharding import (
    AnyRankFlags,
    BufferWatch,
    dtensor_of,
    local_of,
    parametrized_in_forward,
    sharded_like,
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
        self._units = cast("Sequence[FSDPModule]", list(units.values()))
        self._calls: list[int] = []  # the unit's number, and its complement for a backward
        for number, unit in enumerate(units.values()):
            # Not by torch's record of forwards, which ends with a backward.
            unit.register_forward_pre_hook(functools.partial(self._note, number), prepend=True)

    def _note(self, number: int, *unused: Any) -> None:
        del unused
        if self.is_paused:
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
        trained = trained_of(self._units)
        of_ranks: list[tuple[list[int], bytes]] = collectives.all_gather_object((calls, bytes(trained.values())))
        check_trained(trained, [flags for _, flags in of_ranks])
        by_call: list[tuple[int | None, ...]] = [*itertools.zip_longest(*(each for each, _ in of_ranks))]
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
        writes: As for `sharded_parameter`.
        refuse: Returns the error for a parameter's gradient, by name, where no optimizer would step with it; ``None``
            where there is one.

    Attributes:
        modules: The units.
        parameters: The model's by each name, sharded, also while units hold gathered ones.
        calls: Compares which units ranks have run.
        writes: As for `sharded_parameter`.
        depth: How many calls of the model are under way, one inside of the other.
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
        self.depth = self.num_updates = 0
        self.writes = writes
        self.has_backward = False
        self.calls = UnitCalls(cast("Mapping[str, nn.Module]", units))
        self.notes: list[Callable[[], None]] = []
        self._states = states_of(self.modules)
        self._units = [(module, group) for module in self.modules for group in groups_of(module)]
        self.parameters = dict((compiled_module(model) or model).named_parameters(remove_duplicate=False))
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
        self._has_gathered = False
        self._recorded_at: tuple[int, int] | None = None  # `version` when a backward recorded a graph of gathered units
        self._begun: list[tuple[Any, Any, Any]] = []  # units, with torch's functions that the first step brings back
        self._kept: list[tuple[Any, bool]] = []  # what stays gathered since a forward, and whether it was trained then
        for key, parameter in zip(self._keys, self._parameters, strict=True):
            if isinstance(parameter, DTensor):
                # torch's FSDP sets gradients itself; what comes here by autograd comes from uses of the shards.
                watch_gradients(parameter, functools.partial(self._note_used, key))
        for number, module in enumerate(self.modules):
            leave_alone(module)
            for group in groups_of(module):
                members = [(inner, id(inner.sharded_param)) for inner in group.fsdp_params]
                for inner, _ in members:
                    inner.sharded_param.unreduced = self._unreduced
                    inner.sharded_param.on_drop = functools.partial(drop_gradient, inner)
                    inner.sharded_param.on_absent = functools.partial(self._check_reduced, inner)
                group.pre_backward = functools.partial(self._pre_backward, group, [-1], group.pre_backward)
                reduce = not_compiled(
                    functools.partial(self._post_backward, number, group, members, group.post_backward)
                )
                group.post_backward = reduce
                self._begun.append((group, group.pre_forward, group.post_forward))
                sums: dict[int, int] = {}
                group.pre_forward = functools.partial(self._first_forward, members, sums, group.pre_forward)
                group.post_forward = functools.partial(self._after_first_forward, members, sums, group.post_forward)

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
        return self.num_updates, self.writes[0]

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
        self.recover()
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

    def _check_reduced(self, inner: Any) -> None:
        """Raise for a gradient that is read before it is reduced.

        Raises:
            GradientError: If it is one.
        """
        if unreduced_gradient(inner, gathered_of(inner)) is not None:
            name = inner._param_fqn  # noqa: SLF001 - as in `_torch_private`
            msg = (
                f"The gradient of '{name}' is not reduced yet: under `no_sync`, each rank keeps its own, of whole "
                "parameters. Read and change it after a backward outside of `no_sync`; "
                "`booster_runtime.full_gradient`, on every rank, reduces it and returns it."
            )
            raise GradientError(msg)

    def add_of_whole(self, parameter: DTensor, made_at: tuple[int, int], whole: Tensor) -> None:
        """Average over ranks the gradient that came to a parameter's whole values, and add it to that of its shards.

        Args:
            parameter: The sharded parameter.
            made_at: `version` when its values were gathered.
            whole: The whole values, whose gradient is taken away.

        Collective: every rank of the world.
        """
        gradient, whole.grad = whole.grad, None
        assert gradient is not None, "autograd calls this once it has one"
        self.check_age(made_at, gradient)
        if self._refuse is not None:
            raise self._refuse(self._names[self._keys.index(id(parameter))])
        summed = gradient.detach().to(parameter.device_mesh.device_type).contiguous()
        collectives.all_reduce(summed).wait()
        own = local_of(sharded_like(summed / dist.get_world_size(), parameter)).to(local_of(parameter).device)
        if gradient_of(parameter) is None:
            parameter.grad = dtensor_of(own, parameter)
        else:
            local_of(gradient_of(parameter)).add_(own)
        self._note_used(id(parameter))

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
        for group, pre_forward, post_forward in self._begun:
            group.pre_forward, group.post_forward = pre_forward, post_forward
        self._begun = []
        self.reshard()

    def recover(self) -> None:
        """Let torch begin again after a forward or backward that raised; what it has gathered would stay so."""
        if not self.depth and graph_task() == -1 and was_interrupted(self._states):
            forget_interrupted(self.modules)

    def note_kept(self) -> None:
        """Note what stays gathered after a forward, as scripts then freeze and unfreeze that."""
        self._kept = [
            (inner, inner.sharded_param.requires_grad)
            for _, group in gathered_units(self._units)
            for inner in group.fsdp_params
            if gathered_of(inner) is not None
        ]

    def _take_kept(self) -> None:
        """Let parameters and what they are gathered into be frozen alike, as a script has frozen one of the two."""
        for inner, was_trained in self._kept:
            both = (inner.sharded_param, gathered_of(inner))
            if any(each.requires_grad != was_trained for each in both):
                for each in both:
                    each.requires_grad_(not was_trained)
        self._kept = []

    def reshard(self) -> None:
        """Free gathered parameters: a forward without backward leaves some, and their values get old.

        Raises:
            ConfigError: If a script has written to them.
        """
        self.recover()
        written = [inner for inner, _ in self._kept if self._was_written(inner, gathered_of(inner))]
        self._take_kept()
        recorded_at, self._recorded_at = self._recorded_at, None
        if recorded_at is not None:
            self.modules[0].set_reshard_after_backward(True)
        for module, group in gathered_units(self._units):
            if group._all_gather_result is not None:  # noqa: SLF001 - begun ahead of a forward that has not come
                group.wait_for_unshard()
            if has_unreduced(group):
                self._unreduced.add(group)
            if recorded_at is not None and group.is_unsharded:
                self._leave_to_graph(group, recorded_at)
            module.reshard()
        for inner in written:
            if gathered_of(inner) is not None:
                forget_gathered(inner)
        if written:
            raise _dropped(written[0])

    def _leave_to_graph(self, group: Any, made_at: tuple[int, int]) -> None:
        """Let a recorded graph, which may still be run, keep what a unit holds; its gradients are added here."""
        for inner in group.fsdp_params:
            whole = gathered_of(inner)
            add = functools.partial(self.add_of_whole, inner.sharded_param, made_at)
            left = unreduced_gradient(inner, whole)
            drop_gradient(inner)
            forget_gathered(inner)
            if left is not None:
                whole.grad = left.to(whole.dtype)
                add(whole)
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(add)

    def _note_unreduced(self) -> None:
        """Note gathered units with gradients: in outputs that torch can't look into, it does not see these units."""
        for _, group in gathered_units(self._units):
            if has_unreduced(group):
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

    def _first_forward(self, members: Sequence[tuple[Any, int]], sums: dict[int, int], gather: Any, *given: Any) -> Any:
        """Gather a unit before the first step, and remember its values.

        Args:
            members: Its parameters, as torch holds them and by the ids of the model's.
            sums: Filled with the sums over the bits of each, by id.
            gather: torch's function.
            *given: Its arguments.
        """
        result = gather(*given)
        if torch.is_grad_enabled():  # evaluation alone would pay for it without end
            sums.update(self._sums_of(members))
        return result

    def _after_first_forward(
        self, members: Sequence[tuple[Any, int]], sums: dict[int, int], reshard: Any, *given: Any
    ) -> Any:
        """Let a unit's parameters be sharded again, if they have the values with which `_first_forward` gathered them.

        Activation normalization of flows sets its own by the first batch (Kingma and Dhariwal, Glow, 2018), often
        through ``.data``, which raises no version.

        Raises:
            ConfigError: If they have others, which would be lost.
        """
        before = {**sums}
        sums.clear()
        now = self._sums_of(members) if before else {}
        for inner, key in members:
            if key in now and before.get(key, now[key]) != now[key]:
                raise _dropped(inner)
        return reshard(*given)

    def _sums_of(self, members: Sequence[tuple[Any, int]]) -> dict[int, int]:
        here = ((key, gathered_of(inner)) for inner, key in members if key not in self._excepted)
        # Composed tensors, such as gathered ones in 8 bits, have no bits of their own.
        plain = {key: each for key, each in here if each is not None and not hasattr(each, "__tensor_flatten__")}
        sums = [sum_of_bits(each) for each in plain.values()]
        return dict(zip(plain, torch.stack(sums).tolist(), strict=True)) if sums else {}

    def _pre_backward(self, group: Any, task: list[int], gather: Any, *unused: Any) -> None:
        """Gather a unit, which stays gathered after a backward that records a graph, such as for a penalty.

        The backward of that graph needs what the unit holds.

        Args:
            group: Of the unit.
            task: The last backward that came to it, as its only element.
            gather: torch's function.
            *unused: Its arguments.

        Raises:
            GradientError: If a backward has raised in this unit, so that torch would not gather it.
        """
        now = graph_task()
        if task[0] != now:
            if is_in_backward(group) and group.is_sharded:
                msg = (
                    "The backward before this one raised, and this one goes through a forward before that. Drop the "
                    "gradients by `optimizer.zero_grad()`, and run forward again."
                )
                raise GradientError(msg)
            task[0] = now
            if self._kept:
                self._take_kept()
        if torch.is_grad_enabled() and self._recorded_at is None:
            self.modules[0].set_reshard_after_backward(False)
            self._recorded_at = self.version
        gather(*unused)

    def _post_backward(
        self, number: int, group: Any, members: Sequence[tuple[Any, int]], reduce: Any, *unused: Any
    ) -> None:
        """Complete a unit's gradients, then let torch reduce them.

        Args:
            number: Of the unit.
            group: Of the unit.
            members: Its parameters, as torch holds them and by the ids of the model's.
            reduce: torch's function.
            *unused: Its arguments.
        """
        for note in self.notes:
            note()
        has_run = gathered_of(group.fsdp_params[0]) is not None  # else its parameters are gathered into nothing
        if self._refuse is not None:
            for inner, _ in members:
                if unreduced_gradient(inner, gathered_of(inner)) is not None:
                    raise self._refuse(inner._param_fqn)  # noqa: SLF001 - as in `_torch_private`
        elif group.reduce_grads:
            self._was_reduced = True
            self._unreduced.discard(group)
            self.calls.note_backward(number)
            if has_run:
                self._complete(members)
        elif has_run:
            self._unreduced.add(group)
        # A unit that never ran has nothing to accumulate, and torch fails where it would convert that.
        if group.reduce_grads or has_run:
            take_formats(group)
            reduce(*unused)

    def _complete(self, members: Sequence[tuple[Any, int]]) -> None:
        """Record the parameters of a unit that this rank has used, and give the others gradients of zero.

        Raises:
            ConfigError: If forward has written to a parameter: torch keeps only shards, so that the values are lost.
        """
        used, missing = [], []
        for inner, key in members:
            whole = inner._unsharded_param  # noqa: SLF001 - as `gathered_of`, a call less
            if was_written(inner, whole) and key not in self._excepted:
                raise _dropped(inner)
            if unreduced_gradient(inner, whole) is not None:
                used.append(key)
            elif whole.requires_grad:
                missing.append((inner, key))
        self._used.update(used)
        self._filled.difference_update(used)
        for inner, key in missing:
            if key not in self._filled and gradient_of(inner.sharded_param) is not None:
                self._used.add(key)
            else:
                self._filled.add(key)
        if missing and not in_transform():  # of `torch.func`: no gradient of a parameter is added up in its backward
            trained = {*used, *(key for _, key in missing)}
            fill_gradients([(inner, gathered_of(inner)) for inner, key in members if key in trained])

    def _was_written(self, inner: Any, whole: Any) -> bool:
        return was_written(inner, whole) and id(inner.sharded_param) not in self._excepted

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


def _dropped(inner: Any) -> ConfigError:
    return ConfigError(
        f"Parameter '{inner._param_fqn}' was changed during forward. FSDP drops that change, as between forward and "  # noqa: SLF001
        "backward, because it keeps only shards. Change parameters after `optimizer.step()`, or keep the module whole "
        "by `ignored_modules`. What a first batch sets, set by a forward before `boost`."
    )


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
