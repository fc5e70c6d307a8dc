"""What the path that a user passes to a save means, and whether it can be what the other arguments say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.checkpoint.files.names import OPTIMIZER, SAFETENSORS, TORCH, FileNames

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a save goes.

    Args:
        folder: The folder of the files.
        max_bytes: Largest size of a file's values; ``None`` for one file.
        file_name: The name of the one file.
        check: Raises what is wrong with the path, as it is on this rank's disk.
    """

    folder: Path
    max_bytes: int | None
    file_name: str | None
    check: Callable[[], None]


def target_of(
    checkpoint: str | Path, names: FileNames, *, shard: bool, prefix: str | None, size_per_shard: int
) -> Target:
    """Return what the arguments of a save mean.

    Raises:
        ConfigError: If they contradict each other.
    """
    path = Path(checkpoint)
    if shard:
        if size_per_shard <= 0:
            msg = f"`size_per_shard={size_per_shard}` is not a size in MiB. The default is 1024."
            raise ConfigError(msg)
        return Target(
            folder=path, max_bytes=size_per_shard * _MIB, file_name=None, check=lambda: check_is_no_file(path)
        )
    if prefix is not None:
        msg = (
            f"`prefix={prefix!r}` names the files of a folder; with `shard=False` the path names the file. Drop one "
            "of them."
        )
        raise ConfigError(msg)
    other = {SAFETENSORS: (TORCH, ".pt", ".pth", ".ckpt"), TORCH: (SAFETENSORS,)}[names.suffix]
    if path.suffix in other:
        wanted = "True" if names.suffix == TORCH else "False"
        remedy = f"Use a name that ends in '{names.suffix}'"
        remedy += f", or `use_safetensors={wanted}`." if names.base != OPTIMIZER else "."
        msg = (
            f"The path '{path}' ends in '{path.suffix}', but a {names.suffix.removeprefix('.')} file would be "
            f"written. {remedy}"
        )
        raise ConfigError(msg)
    return Target(folder=path.parent, max_bytes=None, file_name=path.name, check=lambda: check_is_no_folder(path))


def check_is_no_file(path: Path) -> None:
    """Raise `CheckpointError` if there is a file where a folder goes."""
    if path.exists() and not path.is_dir():
        msg = (
            f"Checkpoint path '{path}' is a file, but `shard=True` writes a folder. Pass another path or `shard=False`."
        )
        raise CheckpointError(msg)


def check_is_no_folder(path: Path) -> None:
    """Raise `CheckpointError` if there is a folder where a file goes."""
    if path.is_dir():
        msg = (
            f"Checkpoint path '{path}' is a folder, but a file is to be written. Pass a file's path (or `shard=True`)."
        )
        raise CheckpointError(msg)
