"""`ShardedModel`: the user's model, whose parameters are in buckets: always whole, or gathered while they are used.

Models without values are laid out first; then each rank makes, reads or gets just what it keeps (`fill_model`).
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.plugin import ModelWrapper
from booster_core.precision import cast_floating
from booster_core.ranks import NamedCall, ObservedCall
from booster_core.state import NamedTensors, TensorShard, full_box
from booster_runtime.model_methods import refuse_pickle
from booster_runtime.sharding import generate_together, raised_on_all, refuse_all_gradients
from booster_zero.engine.bucket import FEW_NUMEL
from booster_zero.engine.states import Keep
from booster_zero.gathering import ParameterHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_core.plugin import BoostContext
    from booster_core.precision import PrecisionPolicy
    from booster_runtime.lazy import Recording
    from booster_zero.engine import Gatherer, ShardedEngine
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.layout import Layout
    from booster_zero.gathering import LeafModules


class ShardedModel(ModelWrapper):
    """The user's model, whose parameters are views of buckets while they are whole.

    Args:
        module: The user's model.
        precision: Precision of the run. Compute in a narrow format runs under autocast, although the parameters
            have that format: inputs and buffers may then be wider.
        sharded: The sharded parameters; ``None`` where nothing is trained.
        gatherer: Has all parameters, and gathers them for each use unless they are always whole; ``None`` where no
            rank has them in shards.

    Where parameters are gathered for each use, ``forward``, ``state_dict`` and `whole_parameters` are collective.
    """

    gatherer: Gatherer | None

    def __init__(
        self,
        module: nn.Module,
        *,
        precision: PrecisionPolicy | None,
        sharded: ShardedEngine | None,
        gatherer: Gatherer | None = None,
    ) -> None:
        super().__init__(module, precision=precision)
        self._sharded = sharded
        self.gatherer = gatherer
        self._on_use = gatherer if gatherer is not None and gatherer.gathers_on_use else None
        self._parameter_hooks: ParameterHooks | None = None
        if self._on_use is not None:
            generate_together(self)

    @property
    def lays_out(self) -> bool:
        """Whether parameters are in buckets: those of a copy are not."""
        return self._sharded is not None or self.gatherer is not None

    def gather_on_use(
        self,
        leaves: LeafModules,
        *,
        with_model: Sequence[nn.Parameter] = (),
        on_passed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Gather parameters when the user's modules run, unless they are always whole; see `ParameterHooks`."""
        if self._on_use is None:
            return
        sharded = self._sharded  # the hooks must not keep this model

        def before_forward() -> None:
            if sharded is not None:
                sharded.reducer.before_forward()
                sharded.reducer.hide_stand_ins()

        def after_forward() -> None:
            if sharded is not None:
                sharded.reducer.show_stand_ins()

        self._parameter_hooks = ParameterHooks(
            self.module,
            self._on_use,
            before_forward,
            after_forward,
            leaves,
            with_model=with_model,
            on_passed=on_passed,
        )

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what `ModelWrapper.held_tensors` does, and the memory of the buckets, after sums that are under way.

        Collective: every rank of the world.
        """
        if self._sharded is not None:
            self._sharded.settle()
        yield from super().held_tensors()
        holder = self._sharded or self.gatherer
        for bucket in () if holder is None else holder.layout.buckets:
            yield from bucket.held_tensors()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy to evaluate with, such as an average: it has this model's values, and no optimizer.

        Where parameters are gathered for each use it is a plain copy of the user's model.

        Raises:
            ConfigError: If they are, outside of `whole_parameters`: they have no values.
        """
        module = copy.deepcopy(self.unwrap(), memo)
        if self._on_use is not None:
            return module
        refuse_all_gradients(module)
        copied = type(self)(module, precision=self.precision, sharded=None)
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, as by ``torch.save``, the user's model without the optimizer.

        Raises:
            CheckpointError: If parameters are gathered for each use: they are not whole here.
        """
        if self._on_use is not None:
            refuse_pickle()
        if self._sharded is None:
            return super().__reduce_ex__(protocol)
        plain = type(self)(self.unwrap(), precision=self.precision, sharded=None)
        plain.training = self.training
        return plain.__reduce_ex__(protocol)

    # ---- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating outputs of a narrow compute format come back in the policy's ``output_dtype``.

        Collective: every rank of the world, where parameters are gathered for each use; else none.
        """
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        # Else not counted: replicas may evaluate on more or fewer batches than others.
        with ObservedCall("forward") if self._on_use is None else NamedCall("forward"):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sharded is None or self._on_use is not None:
            return self._run(*args, **kwargs)
        self._sharded.reducer.before_forward()
        if not self._sharded.gatherer.is_underway:
            return self._run(*args, **kwargs)
        with self._sharded.gatherer.during_forward(self.module):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        precision, module = self.precision, self.module
        if precision is None or not precision.uses_autocast:
            return module(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=precision.compute_dtype):
            outputs = module(*args, **kwargs)
        return cast_floating(outputs, precision.output_dtype)

    # ---- whole values

    @contextlib.contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters of the user's model whole on every rank for the block.

        Args:
            writes: Keep what the block writes into them in place; it must write the same on every rank. Needed where
                they are gathered for each use.

        Raises:
            ConfigError: If they are, and the block writes without ``writes``, or gives a parameter other memory.

        Memory: the whole model on every rank.

        Collective: every rank of the world.
        """
        with self.gathered(writes=writes):
            yield
            if self._on_use is not None and not writes:
                self._on_use.find_writes()
        if self._on_use is not None and not writes:
            self._on_use.tell_changes()

    @contextlib.contextmanager
    def gathered(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters whole for the block, as `whole_parameters` does, whose end no rank waits for.

        What a block without ``writes`` has written, `Gatherer.take_changes` returns after it.

        Args:
            writes: As for `whole_parameters`.

        Collective: every rank of the world at the beginning; none at the end.
        """
        gatherer = self._on_use
        if gatherer is None:
            if self._sharded is not None:
                self._sharded.gatherer.wait()
            yield
            return
        layout = gatherer.layout  # whose buckets the block may exchange
        for bucket in layout.buckets:
            bucket.pins += 1
        try:
            for bucket in layout.buckets:
                gatherer.use(bucket)
            yield
            if writes:
                for bucket in layout.buckets:
                    bucket.write_back()
                    bucket.increment_versions()
        finally:
            for bucket in layout.buckets:
                bucket.pins = max(bucket.pins - 1, 0)
            gatherer.end()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the user's model's whole state, on every rank; see `Booster.save_model` for files.

        Copies, where there is a gatherer.

        Collective: every rank of the world in that case; else none.
        """
        if self.gatherer is None:
            return super().state_dict(*args, **kwargs)
        with NamedCall("state_dict"), ShardedModel.whole_parameters(self):
            state = super().state_dict(*args, **kwargs)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.detach().clone()
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a whole state, the same on every rank, into the user's model; see `Booster.load_model` for files.

        Collective: every rank of the world, where parameters are gathered for each use; else none.
        """
        if self._on_use is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        with NamedCall("load_state_dict"), ShardedModel.whole_parameters(self, writes=True):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)


def fill_model(
    model: nn.Module,
    recording: Recording,
    shards: Iterable[TensorShard],
    context: BoostContext,
    layout: Layout | None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Fill in a boosted model's values: this rank's parts of parameters and masters, and whole buffers.

    One whole parameter exists at a time at most, and none of those whose values are a file's as they are. Of buckets
    that are moved between memories, one is where it can be written to.

    Args:
        model: The user's model; what it has lost to other stages is neither made nor read.
        recording: How its values are made, or where they are.
        shards: What this rank holds; see `ShardedStateAdapter.shards_to_fill`.
        context: Device and ranks.
        layout: The buckets; ``None`` where there are none.
        shapes: The parameters' shapes in the user's model by name, where this rank has split ones.

    Raises:
        LazyInitError: If files that values come from are gone, or have changed.

    Collective: every rank of the world: an error on one is raised on all.
    """
    recording.leave_out_absent()
    bucket_of = {} if layout is None else {slot.index: each for each in layout.buckets for slot in each.plan.slots}
    for index, parameter in enumerate(model.parameters()):
        is_stand_in = any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if is_stand_in and index not in bucket_of:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=context.device)
    named, recorded = NamedTensors.of(model).name_of, recording.name_of
    path_of, moved = {}, {}
    for index, parameter in enumerate(model.parameters()):
        if id(parameter) in recorded:
            path_of[named[id(parameter)]] = path = recorded[id(parameter)]
            bucket = bucket_of.get(index)
            if bucket is not None and bucket.keep is not Keep.ALWAYS:
                moved[path] = bucket
    shapes = shapes or {named[id(parameter)]: tuple(parameter.shape) for parameter in model.parameters()}
    with raised_on_all("boost", context.device), _Present(moved) as present:
        recording.fill(_at_paths(shards, path_of, shapes), context.device, before_write=present.come)
    published = {}
    for bucket in dict.fromkeys(bucket_of.values()):
        if bucket.keep is not Keep.ALWAYS:
            continue
        if bucket.has_masters:  # which were filled
            published[bucket] = bucket.publish()
        else:
            bucket.take_working_values(block_numel=FEW_NUMEL)
    for pending in published.values():
        pending.wait()


class _Present(contextlib.ExitStack):
    """Keeps one bucket in use to be written to: the one that came last.

    Args:
        bucket_of: Buckets by the paths of their parameters.
    """

    def __init__(self, bucket_of: Mapping[str, Bucket]) -> None:
        super().__init__()
        self._bucket_of = bucket_of
        self._bucket: Bucket | None = None

    def come(self, shard: TensorShard) -> None:
        """Have the bucket of a shard in use, if it is one that moves, and no other."""
        bucket = self._bucket_of.get(shard.name)
        if bucket is not None and bucket is not self._bucket:
            self.close()
            self.callback(bucket.round_values)
            self.enter_context(bucket.in_use(changes=True))
            self._bucket = bucket


def _at_paths(
    shards: Iterable[TensorShard], path_of: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[TensorShard]:
    """Yield the shards of parameters without values by their paths in the recording.

    Of a parameter of which this rank has nothing, an empty one is yielded: what is not listed would be made whole.
    """
    elsewhere = {*path_of}
    for shard in shards:
        if shard.name in path_of:
            elsewhere.discard(shard.name)
            yield replace(shard, name=path_of[shard.name])
    for name in sorted(elsewhere):
        shape, data = shapes[name], torch.empty(0)
        yield TensorShard(
            name=path_of[name], global_shape=shape, dtype=data.dtype, box=full_box(shape), flat=(0, 0), data=data
        )
