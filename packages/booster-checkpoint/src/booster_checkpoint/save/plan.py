"""Where everything of a save goes: which file holds which tensor, and which files come last.

Tensors are put in the natural order of their names, so that files do not depend on the plugin, on the number of ranks
or on who owns what: the same state gives the same bytes. All of it is arithmetic on names and sizes, which every rank
repeats alike, once ranks have told each other which tensors they own parts of (`SpecTables`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from booster_checkpoint.files.checksums import block_sizes
from booster_checkpoint.files.names import SAFETENSORS, TORCH, index_text
from booster_checkpoint.files.tensor_file import TensorSpec
from booster_core.errors import CheckpointError, ConfigError, shorten
from booster_core.state import natural_order, tensor_references

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_checkpoint.files.checksums import Block
    from booster_checkpoint.files.tensor_file import FileLayout
    from booster_checkpoint.save.fragments import Fragment
    from booster_checkpoint.save.parts import MergedPart, OwnedSpec, Part
    from booster_checkpoint.session import Session
    from booster_core.state import TensorShard


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

    def frame(self) -> FileLayout:
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
        is_stale: Tells names of files of an older save that this one replaces.
        marks: Names of the files that say so while several files are replaced.
        repaired: Names of such files of interrupted saves that this save replaces, and their indexes.
    """

    token: str
    files: tuple[PlannedFile, ...]
    texts: dict[str, str]
    last: tuple[str, ...]
    homes: tuple[dict[str, int], ...]
    elsewhere: tuple[Collection[str], ...]
    is_stale: Callable[[str], bool]
    marks: tuple[str, ...] = ()
    repaired: Mapping[str, str] = field(default_factory=dict)

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

    def is_stale(name: str) -> bool:
        return name not in written and any(names.includes(name) for names in replaced)

    return SavePlan(
        token=token,
        files=tuple(files),
        texts=all_texts,
        last=tuple(last),
        homes=tuple(homes),
        elsewhere=tuple(said.elsewhere for said in merged),
        is_stale=is_stale,
        marks=tuple(part.names.mark for part in parts if part.has_folder),
        repaired={names.mark: names.index for names in (*replaced, *in_one_file)},
    )


def _in_torch_order(specs: Iterable[TensorSpec], values: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return tensors in the order of their values in a ``torch.save`` file: those inside of other values come last."""
    inside = {key: place for place, key in enumerate(k for value in values.values() for k in tensor_references(value))}
    return tuple(sorted(specs, key=lambda spec: inside.get(spec.key, -1)))


@dataclass(frozen=True)
class OwnedTensors:
    """The tensors of a part that this rank owns parts of.

    Args:
        lines: Name, shape and dtype of each, as JSON.
        numels: The number of elements that it owns of each.
    """

    lines: tuple[str, ...]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, part: Part, shards: Iterable[TensorShard]) -> OwnedTensors:
        """Return what this rank owns of a part.

        Args:
            part: The part.
            shards: Its `Part.owned_shards`.

        Raises:
            CheckpointError: If shards of one tensor have different shapes.
        """
        specs: dict[str, tuple[tuple[int, ...], str]] = {}
        numels: dict[str, int] = {}
        for shard in shards:
            key = shard.key
            shape, _ = specs.setdefault(key, (shard.global_shape, str(part.file_dtype(shard)).removeprefix("torch.")))
            if shape != shard.global_shape:
                msg = f"'{key}' has shards of shape {shape} and of shape {shard.global_shape}."
                raise CheckpointError(msg)
            numels[key] = numels.get(key, 0) + shard.numel
        lines = [json.dumps([key, shape, dtype], separators=(",", ":")) for key, (shape, dtype) in specs.items()]
        return cls(tuple(lines), tuple(numels.values()))

    def digests(self) -> tuple[bytes, bytes]:
        """Return a digest of the tensors, and one of what this rank owns of each."""
        return _digest("\n".join(self.lines)), _digest(repr(self.numels))


def _digest(text: str) -> bytes:
    return bytes(xxhash.xxh3_128_digest(text.encode()))


_Told = tuple[bytes, bytes, bytes]
"""What a rank says of its list: digests of the tensors, of what it owns of each, and of all lists that it remembers."""


class SpecTables:
    """Merges the lists of all ranks, and remembers the result until a rank's list is another one.

    Ranks tell each other digests of their lists. Lists that are the same everywhere don't travel, and neither do lists
    that are those of the save before. Where ranks own different tensors, lists are merged on their way, so that a rank
    receives each tensor's line a few times at most, however many ranks have it.

    Args:
        session: The ranks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, tuple[bytes, list[TensorSpec]]] = {}

    def tell(self, part: Part, owned: OwnedTensors) -> _Told:
        """Return what `merge` needs from every rank."""
        known, _ = self._known.get(part.names.index, (b"", []))
        return (*owned.digests(), known)

    def merge(
        self,
        part: Part,
        owned: OwnedTensors,
        told: Sequence[_Told],
        inside: Sequence[OwnedSpec],
        group: ProcessGroup | None,
    ) -> list[TensorSpec]:
        """Return the whole tensors that all ranks' shards of a part make up, in natural order.

        Args:
            part: The part.
            owned: What this rank owns of it.
            told: What every rank told.
            inside: The tensors inside of the part's values, which all ranks know alike.
            group: The group to communicate in; the default group when ``None``.

        Raises:
            CheckpointError: If a tensor is not owned exactly once, or ranks disagree about its shape or dtype.

        Collective: every rank.
        """
        # What follows is computed from the same values on every rank, and so raises on all of them or on none.
        together = _digest(repr([(tensors, numels) for tensors, numels, _ in told]))
        if any(known != together for _, _, known in told):
            is_alike = len({tensors for tensors, _, _ in told}) == 1
            lines = owned.lines if is_alike else self._session.union(owned.lines, group)
            here = dict(zip(owned.lines, owned.numels, strict=True))
            totals = self._session.total_over_ranks([here.get(line, 0) for line in lines], group)
            entries = zip(json.loads(f"[{','.join(lines)}]"), totals, strict=True)
            specs = _merged((key, tuple(shape), getattr(torch, dtype), n) for (key, shape, dtype), n in entries)
            self._known[part.names.index] = together, specs
        _, specs = self._known[part.names.index]
        if not inside:
            return specs
        return _merged([*((spec.key, spec.shape, spec.dtype, math.prod(spec.shape)) for spec in specs), *inside])


def _merged(owned: Iterable[OwnedSpec]) -> list[TensorSpec]:
    """Return tensors in natural order, once it is known that all of each is there once."""
    specs: dict[str, TensorSpec] = {}
    totals: dict[str, int] = {}
    for key, shape, dtype, numel in owned:
        spec = specs.setdefault(key, TensorSpec(key=key, shape=shape, dtype=dtype))
        if (spec.shape, spec.dtype) != (shape, dtype):
            msg = f"Ranks disagree about '{key}': {spec.shape} of {spec.dtype}, and {shape} of {dtype}."
            raise CheckpointError(msg)
        totals[key] = totals.get(key, 0) + numel
    wrong = [
        f"{key} ({totals[key]} of {math.prod(spec.shape)} elements)"
        for key, spec in specs.items()
        if totals[key] != math.prod(spec.shape)
    ]
    if wrong:
        msg = (
            f"{len(wrong)} tensors are not owned by exactly one rank in each of their parts: {shorten(wrong)}. Are "
            "all ranks saving the same model, under the plugin that boosted it?"
        )
        raise CheckpointError(msg)
    return sorted(specs.values(), key=lambda spec: natural_order(spec.key))
