"""The manifest of a saved training state: its files, their sizes and checksums, and who wrote them.

A folder without a manifest is not a checkpoint, and one that differs from its manifest is a damaged one. The manifest
carries a checksum of itself. Files have a checksum for each of their blocks, so that a load verifies what it reads
while it reads (`ReadChecks`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.checksums import (
    LARGEST_READ_BYTES,
    Block,
    CheckedReads,
    blocks_of_file,
    checksum_of,
    difference,
)
from booster_checkpoint.files.names import SAFETENSORS
from booster_checkpoint.storage import leaves_folder, locate
from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError, CheckpointError, shorten
from booster_core.state import decode_runs, encode_runs, parse_json, split_checksums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from booster_checkpoint.storage import Location

MANIFEST = "manifest.json"
FORMAT_VERSION = 4
"""Version of the manifest and of the folder around it."""
OLDEST_VERSION = 3
"""The oldest that is read; it names the tensors of each file, too."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a manifest says of one file.

    Args:
        nbytes: Its size.
        blocks: Its blocks, from its first byte to its last.
    """

    nbytes: int
    blocks: tuple[Block, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        return {
            "nbytes": self.nbytes,
            "blocks": encode_runs(block.nbytes for block in self.blocks),
            "xxh3": "".join(block.checksum for block in self.blocks),
        }

    @classmethod
    def from_json(cls, content: Any) -> FileEntry:
        """Return the entry that the manifest holds.

        Raises:
            KeyError, TypeError, ValueError: If it is damaged.
        """
        nbytes, checksums = content["nbytes"], split_checksums(content["xxh3"])
        sizes = decode_runs(content["blocks"], len(checksums))
        if any(type(size) is not int or size < 0 for size in (nbytes, *sizes)) or sum(sizes) != nbytes:
            msg = f"blocks of {sizes} bytes in a file of {nbytes}"
            raise ValueError(msg)
        blocks = tuple(Block(size, checksum) for size, checksum in zip(sizes, checksums, strict=True))
        return cls(nbytes=nbytes, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one step.

    Args:
        step: The step that was saved.
        files: The files by their path in the folder, with ``/`` between its parts.
        facts: What wrote them: versions, plugin, number of ranks; for people and ``booster inspect``.
    """

    step: int
    files: Mapping[str, FileEntry]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Location) -> None:
        """Write the manifest into its folder, durably."""
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            **self.facts,
            "files": {name: entry.to_json() for name, entry in sorted(self.files.items())},
        }
        content["xxh3"] = _digest(content)
        (folder / MANIFEST).write_bytes(f"{json.dumps(content, indent=1)}\n".encode())

    @classmethod
    def read(cls, folder: Location) -> Manifest:
        """Return the manifest of a folder; errors are those of `parse` and `Location.read_bytes`."""
        return cls.parse((folder / MANIFEST).read_bytes(), folder)

    @classmethod
    def parse(cls, written: bytes | None, folder: Location) -> Manifest:
        """Return the manifest that a folder's file holds.

        Args:
            written: The file's content; ``None`` where there is no file.
            folder: The folder, for messages.

        Raises:
            CheckpointAbsentError: If there is none.
            CheckpointDamagedError: If it is damaged.
            CheckpointError: If it is of a newer format.
        """
        if written is None:
            msg = f"'{folder}' has no '{MANIFEST}': it is not a saved training state, or not all of one."
            raise CheckpointAbsentError(msg)
        path = folder / MANIFEST
        content = parse_json(written, str(path))
        try:
            version = content["format_version"]
            if version <= FORMAT_VERSION and content.pop("xxh3") != _digest(content):
                msg = f"The manifest '{path}' is damaged: its content is not what its own checksum says."
                raise CheckpointDamagedError(msg)
            if not OLDEST_VERSION <= version <= FORMAT_VERSION:
                remedy = "Update it." if version > FORMAT_VERSION else "Load it with the Booster that wrote it."
                known = f"{OLDEST_VERSION} to {FORMAT_VERSION}"
                msg = f"'{path}' has format version {version}; this Booster reads {known}. {remedy}"
                raise CheckpointError(msg)
            files = {name: FileEntry.from_json(entry) for name, entry in content.pop("files").items()}
            step = content.pop("step")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            msg = f"The manifest '{path}' is damaged: {error!r} where its entries should be."
            raise CheckpointDamagedError(msg) from error
        for name in files:
            if not name or leaves_folder(name):
                msg = f"The manifest '{path}' names the file '{name}', which is not in its folder: damaged or hostile."
                raise CheckpointDamagedError(msg)
        return cls(step=step, files=files, facts=content)

    def below(self, wanted: Iterable[str]) -> list[str]:
        """Return the files that are among, or below, the names of files and folders."""
        wanted = tuple(wanted)
        return [name for name in self.files if any(name == each or name.startswith(f"{each}/") for each in wanted)]

    def is_read_checked(self, name: str) -> bool:
        """Return whether a load verifies a file's values while it reads them, not ahead: one of tensors."""
        blocks = self.files[name].blocks
        return name.endswith(SAFETENSORS) and all(block.nbytes <= LARGEST_READ_BYTES for block in blocks)

    def folder(self, name: str) -> dict[str, int | None]:
        """Return the sizes of the files in a folder of the step."""
        return {
            file.removeprefix(f"{name}/"): entry.nbytes
            for file, entry in self.files.items()
            if file.startswith(f"{name}/")
        }

    def size_problems(self, folder: Location, names: Sequence[str]) -> list[str]:
        """Return which of the named files are missing or have another size, in words.

        Raises:
            CheckpointUnreadableError, StorageUnreachableError: If that can't be found out.
        """
        problems = []
        for name, nbytes in zip(names, folder.sizes(names), strict=True):
            if nbytes is None:
                problems.append(f"'{name}' cannot be found")
            elif nbytes != self.files[name].nbytes:
                problems.append(f"'{name}' has {nbytes} bytes, and was saved with {self.files[name].nbytes}")
        return problems

    def content_problems(self, folder: Location, names: Iterable[str]) -> list[str]:
        """Return which of the named files have another content than the one that was saved, in words.

        Reads every byte of these files.

        Raises:
            CheckpointUnreadableError, StorageUnreachableError: If one can't be read.
        """
        problems = []
        for name in names:
            saved, begin = self.files[name].blocks, 0
            found = blocks_of_file(folder / name, [block.nbytes for block in saved])
            for block, other in zip(saved, found, strict=False):
                if block != other:
                    problems.append(difference(name, begin, block, other.checksum))
                    break
                begin += block.nbytes
        return problems


class ReadChecks:
    """Verifies a step's files of tensors while they are read.

    Args:
        manifest: The step's manifest; ``None`` verifies nothing.
        folder: Its folder.
        is_shared: All ranks load the same tensors from the same disk, so that each block is verified by one of them.

    Attributes:
        problems: What this rank has found damaged, in words.
    """

    def __init__(self, manifest: Manifest | None, folder: Location, *, is_shared: bool) -> None:
        self.problems: list[str] = []
        self._manifest = manifest
        self._folder = f"{folder}/".replace(os.sep, "/")
        self._is_shared = is_shared

    def __call__(self, path: Location) -> CheckedReads | None:
        """Return what verifies a file while it is read; ``None`` for one that is verified ahead."""
        name = str(path).replace(os.sep, "/").removeprefix(self._folder)
        if self._manifest is None or name not in self._manifest.files or not self._manifest.is_read_checked(name):
            return None
        blocks = self._manifest.files[name].blocks
        return CheckedReads(name, blocks, is_shared=self._is_shared, on_damage=self.problems.append)


def verify_folder(folder: Path | Location) -> None:
    """Check a saved training state against its manifest, every byte.

    Raises:
        CheckpointAbsentError, CheckpointDamagedError: If anything is missing or differs; the message names the files.
        CheckpointUnreadableError, StorageUnreachableError: If that can't be found out.
    """
    folder = locate(folder)
    manifest = Manifest.read(folder)
    problems = manifest.size_problems(folder, list(manifest.files)) or manifest.content_problems(folder, manifest.files)
    if problems:
        raise damaged(folder, problems)


def damaged(folder: object, problems: list[str], *, has_changed: bool = False) -> CheckpointDamagedError:
    """Return the error that says what is wrong with a folder.

    Args:
        folder: The folder.
        problems: What is wrong, in words.
        has_changed: Whether values of it may have been loaded.
    """
    shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
    changed = " The values of model and optimizer are partly those of this checkpoint now." if has_changed else ""
    return CheckpointDamagedError(f"The checkpoint '{folder}' is damaged: {shown}.{changed}")


def _digest(content: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def required(manifest: Manifest, folder: Location, names: Iterable[str]) -> None:
    """Check that a saved training state has what a caller wants to load.

    Raises:
        CheckpointError: If one of the files or folders named is not part of it.
    """
    absent = [name for name in names if not manifest.below([name])]
    if absent:
        msg = f"'{folder}' was saved without {shorten(absent)}. Leave out what you do not want to load."
        raise CheckpointError(msg)
