"""Tensors of a checkpoint as entries of a recording: which file, which name, and nothing read before a replay."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.errors import CheckpointError, LazyInitError
from booster_core.matching import Expectation, compare
from booster_core.state import NamedTensors, TensorMeta, TensorShard, extra_state_modules
from booster_runtime.lazy.log import Ref
from booster_runtime.lazy.replay import find_live
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import nn

    from booster_core.checkpoint_io import LoadReport, ModelFiles
    from booster_runtime.lazy.log import Entry
    from booster_runtime.lazy.recorder import Recorder

_SAMPLE_NUMEL = 256
"""How many values of a tensor are read to compare what ranks have in their files."""


class OpenFiles:
    """The checkpoints that one recording reads, each opened once in a replay."""

    def __init__(self) -> None:
        self._open: set[ModelFiles] = set()
        self._stack: ExitStack | None = None

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep what is opened in the body open until its end."""
        if self._stack is not None:
            yield
            return
        try:
            with ExitStack() as self._stack:
                yield
        finally:
            self._stack = None
            self._open.clear()

    def open(self, files: ModelFiles) -> None:
        """Open a checkpoint, if it is not open yet; only inside of `kept_open`.

        Raises:
            CheckpointError: If it can't be read any more, or was changed.
        """
        assert self._stack is not None, "replays keep files open"
        if files not in self._open:
            self._stack.enter_context(files)
            self._open.add(files)


class FileRead:
    """Reads one tensor of a checkpoint; what an entry calls.

    Args:
        recorder: The recording.
        files: The checkpoint.
        name: The tensor's name there.
    """

    def __init__(self, recorder: Recorder, files: ModelFiles, name: str) -> None:
        self._opened = recorder.files
        self._files = files
        self.name = name
        self.meta = files.tensors[name]

    def __call__(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.open().read_whole(self.name)

    def open(self) -> ModelFiles:
        """Return the open checkpoint.

        Raises:
            LazyInitError: If it can't be read any more, or was changed since it was recorded.
        """
        try:
            self._opened.open(self._files)
        except CheckpointError as cause:
            msg = (
                f"'{self._files.path}', which a lazy model gets '{self.name}' from, can't be read any more: {cause} "
                "Keep the files until the model is boosted."
            )
            raise LazyInitError(msg) from cause
        return self._files

    def sample(self) -> bytes:
        """Return what tells this tensor from another file's tensor of the same name: a few of its values.

        Raises:
            LazyInitError: As `open`.
        """
        shape = self.meta.shape
        box = tuple((size // 2, min(size // 2 + 1, size)) for size in shape[:-1])
        box += tuple((0, min(_SAMPLE_NUMEL, size)) for size in shape[-1:])
        numel = 0 if 0 in shape else math.prod(end - start for start, end in box)
        values = torch.empty(numel, dtype=self.meta.dtype)
        if numel:
            shard = TensorShard(
                name=self.name, global_shape=shape, dtype=values.dtype, box=box, flat=(0, numel), data=values
            )
            self.open().read(self.name, shard)
        return f"{self.name} {shape} {self.meta.dtype}".encode() + values.view(torch.uint8).numpy().tobytes()


def record_read(recorder: Recorder, files: ModelFiles, name: str) -> LazyTensor:
    """Return a lazy tensor that will have the values of a checkpoint's tensor."""
    read = FileRead(recorder, files, name)
    like = torch.empty(read.meta.shape, dtype=read.meta.dtype, device="meta")
    return recorder.record_source("a tensor of a file", read, like)


def find_reads(entries: Sequence[Entry], wanted: Collection[int]) -> dict[int, FileRead]:
    """Return for each wanted slot that holds a file's tensor, at most converted to another dtype, how it is read."""
    touching: dict[int, list[Entry]] = defaultdict(list)
    for index in find_live(entries, wanted):
        for slot in entries[index].touches:
            touching[slot].append(entries[index])
    found = {}
    for slot in wanted:
        makers = [entry for entry in touching[slot] if slot not in entry.reads or slot in entry.writes]
        if len(makers) == 1:
            read = _read_behind(makers[0], touching)
            if read is not None:
                found[slot] = read
    return found


def _read_behind(maker: Entry, touching: dict[int, list[Entry]]) -> FileRead | None:
    """Return the read that an entry is, or whose values it converts."""
    if isinstance(maker.function, FileRead):
        return maker.function
    if maker.name != "aten::_to_copy" or not maker.results or not isinstance(maker.args[0], Ref):
        return None
    taken, made = maker.args[0], maker.results[0][1]
    is_whole = (taken.size, taken.stride, taken.offset) == (made.size, made.stride, made.offset)
    makers = [entry for entry in touching[taken.slot] if taken.slot not in entry.reads or taken.slot in entry.writes]
    if not is_whole or len(makers) != 1 or not isinstance(makers[0].function, FileRead):
        return None
    return makers[0].function


def load_pretrained(model: nn.Module, checkpoint: str | Path, *, strict: bool = True) -> LoadReport:
    """Let a lazy model have the values of a checkpoint instead of those that its construction draws.

    Nothing is read but names and shapes: the values are read when the model is boosted, by each rank as far as it
    keeps them. Initialisers of tensors that are in the checkpoint never run; where none is left to draw, random
    generators are left as they were before `LazyInitContext`.

    Args:
        model: A lazy model. Floating values are converted to its dtypes.
        checkpoint: A file, an index, or a folder, in any form that `Booster.load_model` reads.
        strict: Raise unless model and checkpoint hold the same tensors; ``False`` takes those that fit.

    Returns:
        What will be loaded and what will not.

    Raises:
        LazyInitError: If the model has its values already.
        CheckpointError: If the checkpoint can't be read, or with ``strict`` does not fit.
    """
    named = NamedTensors.of(model)
    lazies = [tensor for tensor in named.tensors.values() if isinstance(tensor, LazyTensor)]
    if not lazies:
        msg = "`load_pretrained` is for lazy models; this one has its values. Boost it and use `Booster.load_model`."
        raise LazyInitError(msg)
    files = checkpoint_io_class().open_model(Path(checkpoint).resolve(), model)
    extra = extra_state_modules(model)
    metas = {name: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named.tensors.items()}
    expected = Expectation(tensors=metas, aliases=named.aliases, extra=tuple(extra))
    report, found = compare(files.tensors, files.values, expected)
    if strict and not report.is_complete:
        msg = f"'{files.path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
        raise CheckpointError(msg)
    with files, torch.no_grad():
        for name, stored in found.items():
            tensor = named.tensors[name]
            if isinstance(tensor, LazyTensor):
                value = record_read(tensor.lazy_recorder, files, stored)
                tensor.data = value.to(device=tensor.device, dtype=tensor.dtype)
            else:
                tensor.copy_(files.read_whole(stored))
        for name, value in files.extra_values(extra).items():
            extra[name].set_extra_state(value)
    for recorder in {id(tensor.lazy_recorder): tensor.lazy_recorder for tensor in lazies}.values():
        recorder.draws_if_needed = True
    return report
