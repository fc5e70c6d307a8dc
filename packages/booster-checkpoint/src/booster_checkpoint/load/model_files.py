"""A model's files as booster-core's `ModelFiles`: looked at once, and opened again where values are read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from booster_checkpoint.files.composed import ComposedTensors
from booster_checkpoint.files.names import MODEL
from booster_checkpoint.files.safetensors_file import holds_low_bits
from booster_checkpoint.load.fill import ShardReader
from booster_checkpoint.load.naming import as_model_names
from booster_checkpoint.load.source import open_source
from booster_core.checkpoint_io import ModelFiles
from booster_core.state import NamedTensors, extra_state_modules

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from booster_checkpoint.storage import Location
    from booster_core.state import TensorShard

_STAGE_BYTES = 1 << 24
"""Most memory for values that can't be read straight into their place."""


class SourceModelFiles(ModelFiles):
    """A checkpoint's tensors by a model's names, each read by ranges.

    Args:
        path: A file, an index, or a folder.
        model: Whose names tensors get, as far as transformers knows these; ``None`` leaves the files' own.
        dequantized: Whether quantized weights are the values that they stand for, where there is no model to tell.

    Raises:
        CheckpointError: If the files can't be read.
    """

    def __init__(self, path: Location, model: nn.Module | None, *, dequantized: bool = False) -> None:
        known: tuple[str, ...] = ()
        if model is not None:
            named = NamedTensors.of(model)
            known = (*named.tensors, *named.aliases, *extra_state_modules(model))
        self._is_dequantized = dequantized if model is None else not holds_low_bits(model)
        with open_source(path, MODEL, dequantized=self._is_dequantized) as source:
            composed = as_model_names(source, model, known)
            pieces = [piece.key for layout in composed.layouts.values() for piece in layout.pieces]
            self._stored = {key: source.tensors[key] for key in pieces}
        self._layouts, self._place = composed.layouts, path
        super().__init__(str(path), composed.tensors, composed.values)
        self._reader: ShardReader | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            source = stack.enter_context(open_source(self._place, MODEL, dequantized=self._is_dequantized))
            self._check_unchanged(self._stored, source.tensors)
            tensors = ComposedTensors(source, self._layouts, {})
            self._reader = stack.enter_context(ShardReader(tensors, _STAGE_BYTES))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader = None
        self._stack.close()

    def read(self, name: str, shard: TensorShard) -> None:
        assert self._reader is not None, "read inside of the body only"
        self._reader.fill(shard, name)
