"""`ShardedOptimizer`: one of the user's optimizers over this rank's pieces of parameters; updates reach every rank.

A step reads top to bottom in `ShardedOptimizer.step` and `ShardedOptimizer.update_parameters`. All that belongs to the
model rather than to one of its optimizers is in the `ShardedEngine`.

torch's own optimizers keep everything that they remember by parameter, so they may step on some parameters at a time.
Another class may count steps for a whole group, or keep state of its own, and steps on everything at once. Methods of a
class other than torch's, such as ``train`` and ``eval`` of schedule-free optimizers, may write parameters, of which
they see this rank's pieces alone: what they write is brought into all parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, OffloadError
from booster_core.gradients import check_finite_norm, global_norm
from booster_core.plugin import OptimizerWrapper, write_gradient
from booster_core.ranks import NamedCall, refuse_capture
from booster_runtime.sharding import OF_TORCH, AnyRankFlags, CouplingCheck, may_couple, not_optimized
from booster_zero.engine.bucket import bit_sums, stepping_on
from booster_zero.engine.memory import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.engine import ShardedEngine


class ShardedOptimizer(OptimizerWrapper):
    """Steps one of the user's optimizers on this rank's part of its parameters, and shares the results.

    Args:
        engine: The sharded parameters.
        number: Which of the engine's optimizers to step.
        offloads: Whether state may be elsewhere than where forward runs. It is stepped on bucket by bucket then, if the
            optimizer allows.
        **kwargs: As for `OptimizerWrapper`.

    Attributes:
        engine: As given; the optimizers of a model share it.
        number: As given.
        layout: The engine's.
        reducer: The engine's.
        names: The engine's.
    """

    def __init__(self, engine: ShardedEngine, number: int = 0, *, offloads: bool, **kwargs: Any) -> None:
        self.engine = engine
        self.number = number
        self.hosted = engine.hosted[number]
        optim = self.hosted.optimizer
        # Asked before the wrapper puts a hook of its own around `step`.
        self._steps_in_parts = offloads and steps_in_parts(optim)
        self._may_assign = type(optim) not in OF_TORCH  # to what `parameter.data` is
        holders = engine.ranks.holders
        has_all = engine.ranks.shard_size == 1 and (holders is None or holders.size() == dist.get_world_size())
        is_unknown = not has_all and may_couple(optim, engine.config.partition)
        self._coupling = CouplingCheck(optim, is_unknown=is_unknown, device=engine.device)
        super().__init__(optim, **kwargs)
        self.sends_settings = not engine.compares_settings
        engine.scaling = self.scaling
        if self._context is not None:
            engine.context = self._context
        self.layout, self.reducer, self.names = engine.layout, engine.reducer, engine.names

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        is_own = getattr(found, "__self__", None) is self.optim and not hasattr(torch.optim.Optimizer, name)
        return functools.partial(self._call_own_method, name, found) if is_own else found

    def _call_own_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's optimizer that torch's have not, and bring what it writes to every rank.

        Collective: every rank of the world, with the same arguments.
        """
        buckets, engine = self.buckets(), self.engine
        with NamedCall(f"optimizer.{name}"):
            engine.gatherer.begin_step()
            with contextlib.ExitStack() as stack:
                for bucket in buckets:
                    if bucket.memory.moves:
                        stack.enter_context(bucket.stepping())
                before = [bit_sums(bucket.values) for bucket in buckets]
                with self.hosted.showing_pieces():
                    result = method(*args, **kwargs)
                self.take_assigned(buckets)
                same = [torch.equal(was, bit_sums(each.values)) for was, each in zip(before, buckets, strict=True)]
            # A rank that owns nothing of a bucket does not see what others have written into it.
            anywhere = AnyRankFlags(bytearray(not each for each in same), engine.device, engine.ranks.holders).wait()
            engine.gatherer.end_step({each: each.publish() for each in itertools.compress(buckets, anywhere)})
        return result

    def find_unlisted(self, model: nn.Module) -> list[nn.Parameter]:
        """Return none: all trained parameters are laid out."""
        del model
        return []

    def buckets(self) -> Sequence[Bucket]:
        """Return the buckets that this optimizer steps on, in the order in which forward is expected to use them."""
        return self.engine.in_order_of_forward(self.number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already, or the group has settings by
                which one parameter influences the update of another.

        Collective: every rank of the shard group, where parameters are in buckets already; else none. Every rank must
        add the same, between a step and the next backward.
        """
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        members = self.engine.new_members(listed)
        self.optim.add_param_group({**param_group, "params": listed})
        try:
            self.check_group(self.optim.param_groups[-1])
        except ConfigError:
            self.optim.param_groups.pop()
            raise
        self.engine.add_group(self.number, members)
        self._steps_in_parts = self._steps_in_parts and steps_in_parts(self.optim)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Check that the optimizer inside can step on the parameters of a group; strategies add what it can't.

        Raises:
            ConfigError: If it can't.
        """

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under stage 1's ``no_sync`` none.
        """
        refuse_capture("backward")
        gatherer = self.engine.gatherer
        gatherer.begin_backward()
        try:
            with NamedCall("reduction of gradients"), self.reducer.guarded():
                super().backward(loss, inputs, retain_graph=retain_graph)
        finally:
            gatherer.end_backward()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's pieces; see `OptimizerWrapper.state_dict`."""
        with self.hosted.showing_pieces():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this rank's pieces; see `OptimizerWrapper.load_state_dict`."""
        with self.hosted.showing_pieces():
            super().load_state_dict(state_dict)

    def stepped(self) -> list[nn.Parameter]:
        """Return this rank's pieces."""
        return self.hosted.pieces

    def drawing_group(self) -> ProcessGroup | None:
        """Return the ranks that hold the same shards."""
        return self.engine.ranks.replica_group

    def settle(self) -> None:
        """Bring all gradients into the shards; see `ShardedEngine.settle`.

        Collective: every rank of the world.
        """
        self.engine.settle()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's pieces, averaged over ranks.

        Raises:
            GradientError: If a script has assigned ``parameter.grad``.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        self.reducer.check_assigned()
        return [
            gradient
            for bucket in self.layout.buckets
            if bucket.format.optimizer == self.number
            for gradient in bucket.used_gradients()
        ]

    def gradient_layout(self) -> Any:
        """Return of which parameters this rank has gradients, and in which order they are laid out."""
        self.settle()
        used = self.engine.used_anywhere
        return [
            self.names[slot.index]
            for bucket in self.layout.buckets
            if bucket.format.optimizer == self.number
            for slot in bucket.plan.slots
            if used.get(slot.index)
        ]

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield what `gradients` returns: at once, or a bucket's at a time where a memory moves them.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        if not self.engine.memory.moves:
            yield self.gradients()
            return
        self.settle()
        self.reducer.check_assigned()
        for bucket in self.buckets():
            if bucket.has_gradient:
                with bucket.in_use(Role.GRAD, changes=True):
                    yield bucket.used_gradients()

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once."""
        # Rounded once, at the end, so that the norm does not depend on how buckets are cut.
        parts = [global_norm(part, norm_type, dtype=torch.float64) for part in self._parts_of_all() if part]
        group = self.engine.ranks.shard_group or dist.group.WORLD
        groups = [] if group is None else [group]
        norm = global_norm(parts, norm_type, groups=groups, dtype=self.norm_dtype, device=self.engine.device)
        if error_if_nonfinite:
            check_finite_norm(norm)
        if max_norm == math.inf:
            return norm
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as `clip_by_norm` does
        if norm.device.type != "cpu" or not bool(factor == 1.0):  # asking a device takes longer than multiplying
            factors = {norm.device: factor}
            for part in self._parts_of_all():
                if part:
                    place = part[0].device
                    if place not in factors:  # reading it for the host waits for the device
                        factors[place] = factor.to(place)
                    torch._foreach_mul_(part, factors[place])
        return norm

    def _parts_of_all(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of all of the model's optimizers."""
        for optimizer in self.scaling.optimizers:
            yield from optimizer.gradients_in_parts()

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - as in core
        """Return whether a gradient overflowed on any rank.

        Collective: every rank of the world.
        """
        return any(AnyRankFlags(bytearray([overflow]), self.engine.device).wait())

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether gradients of a parameter are reduced for this optimizer: it is trained, or in a group."""
        index = self.engine.index_of.get(id(parameter))
        return index is not None and self.layout.optimizer_of(index) == self.number

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, without loss scale; ``None`` where no rank used it.

        Args:
            parameter: One that this optimizer `holds`.

        Collective: every rank of the world.
        """
        index = self.engine.index_of[id(parameter)]
        self.settle()
        if not self.engine.used_anywhere.get(index):
            return None
        whole = self.layout.whole_gradient(index, parameter.numel())
        if self.gradient_scale is not None:
            whole /= self.gradient_scale
        return whole.view(parameter.shape)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) the gradients of what this optimizer steps on, reduced or not."""
        if set_to_none:
            self.engine.drop_gradients(self.number)
        else:
            self.reducer.zero(self.buckets())
        with self.hosted.showing_pieces():  # asking parameters that are gathered for each use takes a call for each
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's pieces, and bring every rank's into all parameters; see `OptimizerWrapper.step`.

        Collective: every rank of the world.
        """
        if closure is None:
            self._clip_as_configured()
        return super().step(closure)  # which unscales, and calls `update_parameters` unless a gradient overflowed

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces, then share them.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out, or ranks differ in what they must
                have alike.
            GradientError: If a script has assigned ``parameter.grad``.
            OffloadError: On every rank, if state could not be read or written on one.

        Collective: every rank of the world.
        """
        engine = self.engine
        engine.gatherer.begin_step()
        published: dict[Bucket, Pending] = {}
        result, error = None, None
        if closure is not None:
            with self.hosted.showing_pieces():
                result = self._step_with(closure)
        else:
            self.settle()
            engine.hear()
            self.reducer.check_assigned()
            try:
                with self.hosted.showing_pieces():
                    result = self._step_pieces(published)
            except OffloadError as caught:
                if not engine.memory.moves:
                    raise
                error = caught
            if engine.memory.moves:
                engine.raise_together(error)
        engine.send_buffers()
        for bucket in self.buckets():
            if engine.is_used(bucket) and bucket not in published:
                published[bucket] = bucket.publish()
        engine.gatherer.end_step(published)
        if engine.has_replicas:
            self.scaling.settings.note_versions(engine.layout.alike)
        engine.note_step(self.number)
        return result

    def _step_pieces(self, published: dict[Bucket, Pending]) -> Any:
        """Step on all pieces at once; offloaded ones bucket by bucket, each on its way while the next one is stepped.

        Collective: the shard group.
        """
        buckets = [bucket for bucket in self.buckets() if self.engine.is_used(bucket)]
        result = None
        if not self._steps_in_parts:
            with stepping_on(buckets):
                result = self.step_inside()
                self.take_assigned(buckets)
                self.engine.keep_state(buckets)
            return result
        groups = [list(group["params"]) for group in self.param_groups]
        has_stepped = False
        for bucket in buckets:
            with bucket.stepping():
                own = {id(piece.values) for piece in bucket.pieces if piece.values.grad is not None}
                if own:
                    has_stepped = True
                    self._bring_counters(own)
                    with only(self.optim, [[values for values in group if id(values) in own] for group in groups]):
                        result = self.step_inside()
                    self.engine.keep_state([bucket])
                published[bucket] = bucket.publish()
        if not has_stepped:  # schedulers count steps, also where this rank has nothing to update
            with only(self.optim, [[] for _ in groups]):
                result = self.optim.step()
        return result

    def step_inside(self) -> Any:
        """Step the user's optimizer, on what its groups list.

        Collective: as `CouplingCheck.run`.
        """
        return self._coupling.run(self.optim.step)

    def _bring_counters(self, pieces: Container[int]) -> None:
        """Move the counters of steps to where pieces are stepped on, for optimizers that take them from there.

        Others keep them on the host, so that reading them does not stop the device.

        Args:
            pieces: The ids of the pieces' values.
        """
        for group in self.param_groups:
            if group.get("fused") or group.get("capturable"):
                for values in group["params"]:
                    state = self.optim.state.get(values, {}) if id(values) in pieces else {}
                    if isinstance(step := state.get("step"), torch.Tensor) and step.device != values.device:
                        state["step"] = step.to(values.device)

    def take_assigned(self, buckets: Iterable[Bucket]) -> None:
        """Bring back what the optimizer inside has assigned to ``parameter.data``, which torch's own ones never do.

        Args:
            buckets: Those that it has stepped on, which are in use.

        Raises:
            ConfigError: If values have another shape.
        """
        for bucket in buckets if self._may_assign else ():
            bucket.take_assigned(self.names)

    def _step_with(self, closure: Callable[[], float]) -> Any:
        """Let the optimizer inside evaluate the model, once.

        Raises:
            ConfigError: If it does so again: what it has written meanwhile is in this rank's pieces alone.
        """
        has_evaluated = False
        with contextlib.ExitStack() as stack:

            def evaluated() -> float:
                nonlocal has_evaluated
                if has_evaluated:
                    name = type(self.unwrap()).__qualname__
                    msg = (
                        f"{name} evaluates the model several times in a step, and would compute between these with "
                        "this rank's part of the parameters alone. Use plugin='ddp', or another optimizer."
                    )
                    raise ConfigError(msg)
                has_evaluated = True
                loss = closure()
                self.settle()
                self.engine.hear()
                self.reducer.check_assigned()
                self._clip_as_configured()
                for bucket in self.buckets():
                    if self.engine.is_used(bucket):
                        stack.enter_context(bucket.stepping())
                return loss

            result = self._coupling.run(functools.partial(self.optim.step, evaluated))
            self.take_assigned(bucket for bucket in self.buckets() if self.engine.is_used(bucket))
            self.engine.keep_state(self.buckets())
        return result

    def _clip_as_configured(self) -> None:
        max_norm = self.engine.config.max_norm
        if max_norm > 0 and self.scaling.norm is None:
            self.clip_grad_by_norm(max_norm)


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Return whether calling ``step`` once for each part of the parameters equals calling it once for all.

    Args:
        optimizer: The user's optimizer. One with hooks around ``step`` is stepped once: hooks count steps.
    """
    return type(optimizer) in OF_TORCH and not _has_step_hooks(optimizer)


@contextlib.contextmanager
def only(optimizer: Optimizer, held: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
    """Let an optimizer's groups list some of their parameters only, while the body runs.

    Args:
        optimizer: The optimizer.
        held: For each group, the parameters that it lists meanwhile.
    """
    groups = optimizer.param_groups
    everything = [list(group["params"]) for group in groups]
    try:
        for group, some in zip(groups, held, strict=True):
            group["params"][:] = some
        yield
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"][:] = parameters


def _has_step_hooks(optimizer: Optimizer) -> bool:
    return any(bool(vars(optimizer).get(name)) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))


@contextlib.contextmanager
def keeping_gradients(optimizer: Optimizer | None, *, in_shards: bool) -> Iterator[None]:
    """Keep gradients, inside, until the first backward after the body, or `ShardedOptimizer.settle`.

    Args:
        optimizer: The boosted optimizer; nothing changes where it is another.
        in_shards: Reduce them into shards, which are averaged over replicas afterwards; else they stay whole, here.

    Collective: none; each backward inside is, in the shard group, ``in_shards``.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        yield
        return
    reducer, underway = optimizer.reducer, optimizer.reducer.underway
    before = reducer.is_paused, underway.averages
    if in_shards:
        underway.averages = False
    else:
        reducer.is_paused = True
    try:
        yield
    finally:
        reducer.is_paused, underway.averages = before


def set_gradient(optimizers: Sequence[Optimizer], parameter: nn.Parameter, values: Tensor, name: str) -> None:
    """Replace this rank's part of a gradient that has been reduced.

    Args:
        optimizers: The boosted optimizers of the model.
        parameter: The parameter; some rank has used it.
        values: In the parameter's shape, without loss scale.
        name: The parameter's name, for errors.

    Raises:
        ConfigError: If none of the optimizers holds the parameter.
    """
    optimizer = holder_of(optimizers, parameter)
    if optimizer is None:
        raise not_optimized(name)
    layout = optimizer.layout
    index = next(index for index, each in layout.parameters.items() if each is parameter)
    bucket = layout.bucket_of(index)
    piece = bucket.piece_of.get(index)
    if piece is not None:
        with bucket.in_use(Role.GRAD, changes=True):
            part = values.reshape(-1)[piece.start : piece.stop].view(piece.values.shape)
            write_gradient(bucket.slice_of(bucket.make_gradient(), piece), part, optimizer)


def holder_of(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> ShardedOptimizer | None:
    """Return which of a model's boosted optimizers holds a parameter; ``None`` if none does."""
    return next((each for each in optimizers if isinstance(each, ShardedOptimizer) and each.holds(parameter)), None)
