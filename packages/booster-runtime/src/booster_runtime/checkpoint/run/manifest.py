"""The manifest of a saved training state: its files, their sizes, checksums and tensors, and who wrote them.

A folder without a manifest is not a checkpoint, and one that differs from its manifest is a damaged one. The manifest
carries a checksum of itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError, shorten
from booster_runtime.checkpoint.files.index import read_json
from booster_runtime.checkpoint.save.writer import file_checksum, sync_folder, write_text
from booster_runtime.storage import RemotePath, leaves_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Version of the manifest and of the folder around it."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a manifest says of one file.

    Args:
        nbytes: Its size.
        checksum: The hexadecimal xxh3 (64 bits) of its content.
        tensors: The names of its tensors.
    """

    nbytes: int
    checksum: str
    tensors: tuple[str, ...] = ()


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

    def write(self, folder: Path) -> None:
        """Write the manifest into its folder and sync both.

        Collective: none.
        """
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            **self.facts,
            "files": {
                name: {"nbytes": entry.nbytes, "xxh3": entry.checksum, "tensors": list(entry.tensors)}
                for name, entry in sorted(self.files.items())
            },
        }
        content["xxh3"] = _digest(content)
        text = json.dumps(content, indent=1) + "\n"
        if isinstance(folder, RemotePath):
            (folder / MANIFEST).write_bytes(text.encode())
            return
        write_text(folder / MANIFEST, text)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder.

        Raises:
            CheckpointError: If there is none, or it is damaged or of a newer format.

        Collective: none.
        """
        path = folder / MANIFEST
        if folder.is_dir() and not path.exists():
            msg = f"'{folder}' has no '{MANIFEST}': it is not a saved training state, or not all of one."
            raise CheckpointError(msg)
        content = read_json(path)
        try:
            version = content["format_version"]
            if version <= FORMAT_VERSION and content.pop("xxh3") != _digest(content):
                msg = f"The manifest '{path}' is damaged: its content is not what its own checksum says."
                raise CheckpointError(msg)
            if version > FORMAT_VERSION:
                msg = f"'{path}' has format version {version}; this Booster reads up to {FORMAT_VERSION}. Update it."
                raise CheckpointError(msg)
            files = {
                name: FileEntry(nbytes=entry["nbytes"], checksum=entry["xxh3"], tensors=tuple(entry["tensors"]))
                for name, entry in content.pop("files").items()
            }
            step = content.pop("step")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            msg = f"The manifest '{path}' is damaged: {error!r} where its entries should be."
            raise CheckpointError(msg) from error
        for name in files:
            if not name or leaves_folder(name):
                msg = f"The manifest '{path}' names the file '{name}', which is not in its folder: damaged or hostile."
                raise CheckpointError(msg)
        return cls(step=step, files=files, facts=content)

    def size_problems(self, folder: Path, names: Iterable[str]) -> list[str]:
        """Return which of the named files are missing or have another size, in words.

        Collective: none.
        """
        problems = []
        for name in names:
            entry = self.files[name]
            try:
                nbytes = (folder / name).stat().st_size
            except OSError as error:
                problems.append(f"'{name}' cannot be found ({error.strerror})")
                continue
            if nbytes != entry.nbytes:
                problems.append(f"'{name}' has {nbytes} bytes, and was saved with {entry.nbytes}")
        return problems

    def content_problems(self, folder: Path, names: Iterable[str]) -> list[str]:
        """Return which of the named files have another content than the one that was saved, in words.

        Collective: none; reads every byte of these files.
        """
        problems = []
        for name in names:
            try:
                digest = file_checksum(folder / name)
            except OSError as error:
                problems.append(f"'{name}' cannot be read ({error.strerror})")
                continue
            if digest != self.files[name].checksum:
                problems.append(f"'{name}' has the checksum {digest}, and was saved with {self.files[name].checksum}")
        return problems


def verify_folder(folder: Path) -> None:
    """Check a saved training state against its manifest, every byte.

    Raises:
        CheckpointError: If anything is missing or differs; the message names the files.

    Collective: none.
    """
    manifest = Manifest.read(folder)
    problems = manifest.size_problems(folder, manifest.files) or manifest.content_problems(folder, manifest.files)
    if problems:
        raise damaged(folder, problems)


def damaged(folder: Path, problems: list[str]) -> CheckpointError:
    """Return the error that says what is wrong with a folder."""
    shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
    return CheckpointError(f"The checkpoint '{folder}' is damaged: {shown}.")


def _digest(content: Mapping[str, Any]) -> str:
    import xxhash

    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def required(manifest: Manifest, folder: Path, names: Iterable[str]) -> None:
    """Check that a saved training state has what a caller wants to load.

    Raises:
        CheckpointError: If one of the files or folders named is not part of it.
    """
    absent = [name for name in names if not any(f == name or f.startswith(f"{name}/") for f in manifest.files)]
    if absent:
        msg = f"'{folder}' was saved without {shorten(absent)}. Leave out what you do not want to load."
        raise CheckpointError(msg)
