"""Where everything of a save goes: which file holds which tensor, and which files come last.

Tensors are put in the natural order of their names, so that files do not depend on the plugin, on the number of ranks
or on who owns what: the same state gives the same bytes. All of it is arithmetic on names and sizes, which every rank
repeats alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.checksums import block_sizes
from booster_checkpoint.files.names import SAFETENSORS, TORCH, index_text
from booster_core.errors import ConfigError
from booster_core.state import tensor_references

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_checkpoint.files.checksums import Block
    from booster_checkpoint.files.frame import FileFrame, TensorSpec
    from booster_checkpoint.save.fragments import Fragment
    from booster_checkpoint.save.parts import MergedPart, Part
    from booster_checkpoint.session import Session


def split_into_files(specs: Iterable[TensorSpec], max_bytes: int | None) -> list[tuple[TensorSpec, ...]]:
    """Distribute tensors over files in their order; one larger than the limit gets a file of its own.

    Args:
        specs: The tensors, in natural order.
        max_bytes: Largest size of a file's values in bytes; one file for everything when ``None``.

    Returns:
        At least one file (which may be empty). Within a file tensors of wider elements come first, so that each
        tensor's values are aligned to its element size.
    """
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if max_bytes is not None and files[-1] and size + spec.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    # A stable sort: by name among elements of one width.
    return [tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize)) for specs in files]


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file of tensors that a save writes.

    Args:
        name: Its name in the save's folder; a part with a folder has that before it.
        suffix: The kind of file.
        specs: Its tensors, in the order of their values.
        values: Its other values, as encoded JSON.
    """

    name: str
    suffix: str
    specs: tuple[TensorSpec, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    def frame(self) -> FileFrame:
        """Return the file without its tensors' values; recomputed by each call.

        Raises:
            CheckpointError: If its format cannot hold it.
        """
        if self.suffix == SAFETENSORS:
            from booster_checkpoint.files.safetensors_file import safetensors_frame

            return safetensors_frame(self.specs, self.values)
        from booster_checkpoint.files.torch_file import torch_frame

        return torch_frame(self.name.rpartition("/")[2], self.specs, self.values)

    def block_sizes(self, nbytes: int) -> list[int]:
        """Return the sizes of the blocks that get checksums, where the file has ``nbytes`` bytes."""
        if self.suffix != SAFETENSORS:
            return block_sizes([nbytes])
        tensors = [spec.nbytes for spec in self.specs]
        return block_sizes([nbytes - sum(tensors), *tensors])


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that was written.

    Args:
        name: Its name in the save's folder.
        nbytes: Its size.
        blocks: Its blocks, where their checksums were asked for.
    """

    name: str
    nbytes: int
    blocks: tuple[Block, ...] = ()


Sums = dict[str, tuple[int, tuple["Block", ...]]]
"""What the writers of files say of them, by name: size, and blocks where checksums were asked for."""


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The layout of a save; the same on every rank.

    Args:
        token: Text that no other save uses; part of temporary names.
        files: The files of tensors.
        texts: Other files and their content.
        last: The names of the texts that make the others valid (indexes), which are renamed last.
        homes: For each part, and each of its tensors, the position of its file in ``files``.
        elsewhere: For each part, names of tensors that this rank holds but that another rank writes.
        obsolete: Tells names of files of an older save that this one replaces.
        marks: Names of the files that say so while several files are replaced.
        healed: Names of such files of interrupted saves that this save replaces, and their indexes.
    """

    token: str
    files: tuple[PlannedFile, ...]
    texts: dict[str, str]
    last: tuple[str, ...]
    homes: tuple[dict[str, int], ...]
    elsewhere: tuple[Collection[str], ...]
    obsolete: Callable[[str], bool]
    marks: tuple[str, ...] = ()
    healed: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The files in the order in which they get their names."""
        return [
            *(file.name for file in self.files),
            *(text for text in self.texts if text not in self.last),
            *self.last,
        ]

    @property
    def total_bytes(self) -> int:
        """Size of all tensors' values."""
        return sum(spec.nbytes for file in self.files for spec in file.specs)

    @property
    def folders(self) -> list[str]:
        """The folders of the files, inside of the save's; ``""`` is that itself."""
        return sorted({name.rpartition("/")[0] for name in self.names})


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteJob:
    """What ranks write together, in place or by owners.

    Args:
        session: The ranks.
        call: What the user called.
        plan: The plan.
        fragments: What this rank holds; one is read before the next is asked for.
        bucket_bytes: Most memory to use besides the fragments.
        checksums: Compute checksums.
        group: The group to communicate in; the default group when ``None``.
    """

    session: Session
    call: str
    plan: SavePlan
    fragments: Iterable[Fragment]
    bucket_bytes: int
    checksums: bool
    group: ProcessGroup | None


def make_plan(
    where: object,
    token: str,
    parts: Sequence[Part],
    merged: Sequence[MergedPart],
    specs: Sequence[Sequence[TensorSpec]],
    texts: Mapping[str, str],
) -> SavePlan:
    """Return where everything goes, from what all ranks know alike.

    Args:
        where: The folder, for messages.
        token: Text that no other save uses.
        parts: The parts.
        merged: What all ranks write of each besides the tensors that they own.
        specs: For each part, its whole tensors, in natural order.
        texts: Further files and their content.

    Raises:
        ConfigError: If a file's name leads out of its folder.
    """
    files: list[PlannedFile] = []
    homes, all_texts, last = [], dict(sorted(texts.items())), []
    for part, said, part_specs in zip(parts, merged, specs, strict=True):
        divided = split_into_files(part_specs, part.max_bytes)
        home: dict[str, int] = {}
        names = dict[str, str]()  # of tensors' files, in the part's folder
        for number, file_specs in enumerate(divided, start=1):
            name = part.names.part(number, len(divided)) if part.is_divided else part.file_name or part.names.single
            values = said.values if number == 1 else {}
            home |= {spec.key: len(files) for spec in file_specs}
            names |= {spec.key: name for spec in file_specs}
            ordered = _in_torch_order(file_specs, values) if part.names.suffix == TORCH else file_specs
            files.append(PlannedFile(name=part.place_of(name), suffix=part.names.suffix, specs=ordered, values=values))
        homes.append(home)
        part_texts = dict(said.texts)
        if part.is_divided:
            part_texts[part.names.index] = index_text(names, part_specs)
            last.append(part.place_of(part.names.index))
        all_texts |= {part.place_of(name): text for name, text in part_texts.items()}
    written = {file.name for file in files} | all_texts.keys()
    folders = {f"{part.folder}/" for part in parts if part.folder}
    for name in written:
        own = next((name[len(folder) :] for folder in folders if name.startswith(folder)), name)
        if "/" in own or "\\" in own:
            msg = f"The file name '{own}' leads out of '{where}'. Use a `prefix` without separators."
            raise ConfigError(msg)
    # Another form would be read in place of this one by those who look for it first, or ask for it.
    replaced = [form for part in parts if part.has_folder for form in (part.names, *part.names.other_forms)]
    in_one_file = [part.names for part in parts if part.file_name in (None, part.names.single)]

    def is_obsolete(name: str) -> bool:
        return name not in written and any(names.includes(name) for names in replaced)

    return SavePlan(
        token=token,
        files=tuple(files),
        texts=all_texts,
        last=tuple(last),
        homes=tuple(homes),
        elsewhere=tuple(said.elsewhere for said in merged),
        obsolete=is_obsolete,
        marks=tuple(part.names.mark for part in parts if part.has_folder),
        healed={names.mark: names.index for names in (*replaced, *in_one_file)},
    )


def _in_torch_order(specs: Iterable[TensorSpec], values: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return tensors in the order of their values in a ``torch.save`` file: those inside of other values come last."""
    inside = {key: place for place, key in enumerate(k for value in values.values() for k in tensor_references(value))}
    return tuple(sorted(specs, key=lambda spec: inside.get(spec.key, -1)))
