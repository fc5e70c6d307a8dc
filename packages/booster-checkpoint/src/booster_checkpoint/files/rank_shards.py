"""Folders into which each rank has written its own part of each tensor, read like one file of tensors.

``HuggingFaceStorageWriter(save_distributed=True)`` of ``torch.distributed.checkpoint`` writes them, and so does
``save_pretrained(..., distributed_checkpoint=True)`` of transformers: one safetensors file a rank, which says where in
each tensor its part begins, and no table of all files. A file that an older save on more ranks has left would be mixed
in unseen; so the parts of a tensor must fill it, none twice.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from booster_checkpoint.files.parts import is_tiling, read_common
from booster_checkpoint.files.safetensors_file import SafetensorsFile
from booster_checkpoint.files.tensor_file import TensorFile
from booster_core.errors import CheckpointDamagedError
from booster_core.state import Box, TensorMeta, intersect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.storage import Location

_PLACES, _BEGIN = "DCP_SHARDING_INFO", "saved_offsets"
"""The entry of a file's metadata, and in it of a tensor's, that say where parts begin."""


class RankShards(TensorFile):
    """The files of a folder that ranks wrote for themselves, as one file of tensors.

    Args:
        path: The folder.
        sizes: The files in it, and their sizes.
        checks: Returns what verifies a file while it is read, by its path.

    Raises:
        CheckpointDamagedError: If a file is damaged, or the parts of a tensor overlap or leave gaps.
    """

    def __init__(
        self,
        path: Location,
        sizes: Mapping[str, int | None],
        checks: Callable[[Location], CheckedReads | None] = lambda _: None,
    ) -> None:
        self.path = path
        self.tensors = {}
        self.values = {}
        self._files: list[SafetensorsFile] = []
        self._parts: dict[str, list[tuple[Box, SafetensorsFile]]] = {}
        try:
            for opened in path.open_files(sizes):
                file = SafetensorsFile(opened, checks(opened.place))
                self._files.append(file)
                begins = _begins_in(file)
                for key, meta in file.tensors.items():
                    begin = _checked_begin(file, key, meta, begins.get(key))
                    box = tuple((first, first + size) for first, size in zip(begin, meta.shape, strict=True))
                    self._parts.setdefault(key, []).append((box, file))
            for key, parts in self._parts.items():
                self.tensors[key] = self._whole(key, parts)
        except BaseException:
            self.close()
            raise

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        dtype = self.tensors[key].dtype
        for part, file in self._parts[key]:
            if intersect(box, part) is not None:
                read_common(partial(file.read, key), part, box, dtype, out)

    @override
    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def _whole(self, key: str, parts: list[tuple[Box, SafetensorsFile]]) -> TensorMeta:
        """Return what a tensor is whose parts these are."""
        formats = {(len(box), file.tensors[key].dtype) for box, file in parts}
        if len(formats) > 1:
            msg = f"The files in '{self.path}' have parts of '{key}' of other formats: they are of two saves."
            raise CheckpointDamagedError(msg)
        boxes = [box for box, _ in parts]
        shape = tuple(max(last for _, last in ranges) for ranges in zip(*boxes, strict=True))
        if not is_tiling(shape, boxes):
            raise CheckpointDamagedError(self._what_is_wrong(key, parts))
        return TensorMeta(shape=shape, dtype=parts[0][1].tensors[key].dtype)

    def _what_is_wrong(self, key: str, parts: list[tuple[Box, SafetensorsFile]]) -> str:
        for (box, file), (other_box, other) in itertools.combinations(parts, 2):
            if intersect(box, other_box) is not None:
                return (
                    f"'{key}' is in '{file.path.name}' and again in '{other.path.name}' of '{self.path}', so that its "
                    "files are of two saves. Load the folder of one save."
                )
        return (
            f"Parts of '{key}' are in none of the {len(self._files)} files that ranks wrote into '{self.path}': "
            "files are missing. Ranks of other hosts may have written theirs to a disk of their own."
        )


def _begins_in(file: SafetensorsFile) -> dict[str, Any]:
    """Return what a file says of where its parts begin, by tensor."""
    try:
        places = json.loads(file.metadata[_PLACES])
        return {key: place[_BEGIN] for key, place in places.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        msg = f"'{file.path}' does not say where in its tensors its parts begin ('{_PLACES}'): it is damaged."
        raise CheckpointDamagedError(msg) from error


def _checked_begin(file: SafetensorsFile, key: str, meta: TensorMeta, begin: Any) -> list[int]:
    is_place = isinstance(begin, list) and all(type(first) is int and 0 <= first < 1 << 62 for first in begin)
    if not is_place or len(begin) != len(meta.shape):
        msg = f"'{file.path}' says that its part of '{key}' begins at {str(begin)[:100]}: it is damaged."
        raise CheckpointDamagedError(msg)
    return list(begin)
