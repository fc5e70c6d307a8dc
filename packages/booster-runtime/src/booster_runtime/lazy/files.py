"""Tensors of a checkpoint as entries of a recording: which file, which name, and nothing read before a replay."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from booster_checkpoint.files import MODEL, ComposedTensors
from booster_checkpoint.load import Source
from booster_core.errors import CheckpointError, LazyInitError
from booster_runtime.lazy.log import Ref
from booster_runtime.lazy.replay import find_live

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from booster_checkpoint.files import Layout
    from booster_core.state import TensorMeta
    from booster_runtime.lazy.log import Entry

_SAMPLE_NUMEL = 256
"""How many values of a tensor are read to compare what ranks have in their files."""


class Files:
    """The checkpoints that one recording reads, each opened once in a replay."""

    def __init__(self) -> None:
        self._open: dict[Path, Source] = {}
        self._stack: ExitStack | None = None

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep what is opened in the body open until its end."""
        if self._stack is not None:
            yield
            return
        with ExitStack() as self._stack:
            try:
                yield
            finally:
                self._open.clear()
        self._stack = None

    def source(self, path: Path) -> Source:
        """Return an open checkpoint; only inside of `kept_open`.

        Raises:
            CheckpointError: If it can't be read any more.
        """
        assert self._stack is not None, "replays keep files open"
        if path not in self._open:
            self._open[path] = source = Source(path, MODEL)
            self._stack.callback(source.close)
        return self._open[path]


class FileRead:
    """Reads one tensor of a checkpoint; what an entry calls.

    Args:
        files: The recording's files.
        path: The checkpoint.
        key: The tensor's name there.
        meta: What the checkpoint said of it when it was recorded.
        composed: Where several tensors of the checkpoint make it up: how, and what the checkpoint said of each.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        key: str,
        meta: TensorMeta,
        composed: tuple[Layout, Mapping[str, TensorMeta]] | None = None,
    ) -> None:
        self._files = files
        self.path = path
        self.key = key
        self.meta = meta
        self._layout = None if composed is None else composed[0]
        self._parts = {key: meta} if composed is None else composed[1]

    def source(self) -> Source | ComposedTensors:
        """Return the open checkpoint.

        Raises:
            LazyInitError: If it is another one than when it was recorded.
        """
        try:
            source = self._files.source(self.path)
        except CheckpointError as cause:
            msg = (
                f"'{self.path}', which a lazy model gets '{self.key}' from, can't be read any more: {cause} Keep the "
                "files until the model is boosted."
            )
            raise LazyInitError(msg) from cause
        for key, meta in self._parts.items():
            found = source.tensors.get(key)
            if found != meta:
                msg = (
                    f"'{self.path}' was changed since a lazy model was built from it: '{key}' was {meta.shape} of "
                    f"{meta.dtype}, and is {found}. Keep the files until the model is boosted."
                )
                raise LazyInitError(msg)
        return source if self._layout is None else ComposedTensors(source, {self.key: self._layout}, {})

    def __call__(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.source().read_whole(self.key)

    def sample(self) -> bytes:
        """Return what tells this tensor from another file's tensor of the same name: a few of its values.

        Raises:
            LazyInitError: As `source`.
        """
        shape = self.meta.shape
        box = tuple((size // 2, min(size // 2 + 1, size)) for size in shape[:-1])
        box += tuple((0, min(_SAMPLE_NUMEL, size)) for size in shape[-1:])
        values = torch.empty(0 if 0 in shape else math.prod(end - start for start, end in box), dtype=self.meta.dtype)
        if values.numel():
            self.source().read(self.key, box, values)
        return f"{self.key} {shape} {self.meta.dtype}".encode() + values.view(torch.uint8).numpy().tobytes()


def empty_like(meta: TensorMeta) -> torch.Tensor:
    """Return a meta tensor of the geometry that a tensor of a checkpoint has when it is read."""
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")


def find_reads(entries: Sequence[Entry], wanted: Collection[int]) -> dict[int, FileRead]:
    """Return for each wanted slot that holds a file's tensor, at most converted to another dtype, how it is read."""
    is_live = find_live(entries, wanted)
    touching: dict[int, list[Entry]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if is_live[index]:
            for slot in entry.touches:
                touching[slot].append(entry)
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
