"""A checkpoint shown as state, so that it can be written again in another form, a piece at a time.

Nothing is read before it is asked for: a shard reads its values each time its ``data`` is looked at, and no
shard is larger than a piece. So a conversion takes no more memory than a save does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

from booster_checkpoint.load.load import read_optimizer_info
from booster_core.errors import CheckpointError
from booster_core.state import (
    Box,
    StateAdapter,
    TensorShard,
    box_numel,
    box_shape,
    decode_json,
    full_box,
    tensor_references,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_checkpoint.load.source import Source
    from booster_core.state import JSONValue, ParamGroup, TensorMeta

_PIECE_BYTES = 4 << 20


class _Stage:
    """Memory for one shard at a time: many large allocations in turn would leave a heap full of holes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]


class _LazyShard:
    """What `TensorShard` is, with values that are read when they are looked at, all into the same memory."""

    def __init__(self, source: Source, stage: _Stage, key: str, box: Box, name: str, state: str | None) -> None:
        meta = source.tensors[key]
        self._source = source
        self._stage = stage
        self.key = key
        self.name = name
        self.state = state
        self.global_shape = meta.shape
        self.dtype = meta.dtype
        self.box = box
        self.flat = None
        self.is_owner = True

    @property
    def numel(self) -> int:
        return box_numel(self.box)

    @property
    def flat_range(self) -> tuple[int, int]:
        return 0, self.numel

    @property
    def data(self) -> torch.Tensor:
        values = self._stage.take(self.numel * self.dtype.itemsize).view(self.dtype)
        if self.numel:
            self._source.read(self.key, self.box, values)
        return values.view(box_shape(self.box))


class SourceAdapter(StateAdapter):
    """The state that a checkpoint holds. It can be read only.

    Args:
        source: The open checkpoint.
        is_optimizer: It holds an optimizer's state, not a model's.
        piece_bytes: Largest size of a shard, where a tensor's rows allow it.

    Raises:
        CheckpointError: If an optimizer's parameter groups cannot be read.
    """

    def __init__(self, source: Source, *, is_optimizer: bool, piece_bytes: int = _PIECE_BYTES) -> None:
        self._source = source
        self._stage = _Stage()
        self._piece_bytes = piece_bytes
        self._info = read_optimizer_info(source) if is_optimizer else None

    @override
    def model_shards(self) -> Iterator[TensorShard]:
        if self._info is not None:
            # An optimizer's parts ask for the shapes of its parameters, and for no values.
            for name, shape in self._info.shapes.items():
                data = torch.zeros(()).expand(shape)
                yield TensorShard(name=name, global_shape=shape, dtype=data.dtype, box=full_box(shape), data=data)
            return
        inside = {key for value in self._source.values.values() for key in tensor_references(value)}
        for key, meta in self._source.tensors.items():
            if key not in inside:
                yield from self._shards(key, meta, key, None)

    @override
    def tied_names(self) -> Mapping[str, str]:
        return {}

    @override
    def extra_state(self) -> Mapping[str, object]:
        if self._info is not None:
            return {}
        return {
            name: decode_json(value, {key: self._source.read_whole(key) for key in tensor_references(value)})
            for name, value in self._source.values.items()
        }

    @override
    def load_extra_state(self, values: Mapping[str, object]) -> None:
        raise _read_only()

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        assert self._info is not None, "asked of an optimizer"
        members = {name for group in self._info.groups for name in group.params}
        for key, meta in self._source.tensors.items():
            cuts = [index for index, character in enumerate(key) if character == "/" and key[:index] in members]
            if not cuts:
                msg = f"'{key}' in '{self._source.path}' belongs to no parameter of the optimizer's groups."
                raise CheckpointError(msg)
            yield from self._shards(key, meta, key[: cuts[-1]], key[cuts[-1] + 1 :])

    @override
    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        assert self._info is not None, "asked of an optimizer"
        return self._info.scalars

    @override
    def param_groups(self) -> Sequence[ParamGroup]:
        assert self._info is not None, "asked of an optimizer"
        return self._info.groups

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        raise _read_only()

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        raise _read_only()

    def _shards(self, key: str, meta: TensorMeta, name: str, state: str | None) -> Iterator[TensorShard]:
        """Yield a tensor in pieces of whole rows."""
        if not meta.shape:
            boxes: list[Box] = [()]
        else:
            row_bytes = max(math.prod(meta.shape[1:]) * meta.dtype.itemsize, 1)
            step = max(self._piece_bytes // row_bytes, 1)
            rest = full_box(meta.shape[1:])
            starts = range(0, max(meta.shape[0], 1), step)
            boxes = [((start, min(start + step, meta.shape[0])), *rest) for start in starts]
        for box in boxes:
            yield cast("TensorShard", cast("Any", _LazyShard(self._source, self._stage, key, box, name, state)))


def _read_only() -> CheckpointError:
    return CheckpointError("A checkpoint's files are shown here as state that can be read, not loaded into.")
