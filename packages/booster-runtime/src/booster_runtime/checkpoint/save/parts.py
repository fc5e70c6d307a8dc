"""The parts of a save: a model's or an optimizer's state, as named tensors and other values.

A part is asked on every rank for what it owns there, told what all ranks said, and then asked for values and shards.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from booster_core.errors import CheckpointError
from booster_core.state import ParamGroup, TensorShard, full_box
from booster_runtime.checkpoint.files.layout import natural_order
from booster_runtime.checkpoint.save.unsaved import check_model_is_saved_whole, check_optimizer_is_saved_whole
from booster_runtime.state.jsonable import decode_json, encode_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from booster_core.state import StateAdapter
    from booster_runtime.checkpoint.files.names import FileNames

FORMAT_VERSION = 1
"""Version of ``param_groups.json``."""


class Part(ABC):
    """State that is written under one set of file names.

    Args:
        names: How its files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file.
        file_name: Name of the one file, where it is not ``names.single``.
    """

    def __init__(self, names: FileNames, *, max_bytes: int | None = None, file_name: str | None = None) -> None:
        self.names = names
        self.max_bytes = max_bytes
        self.file_name = file_name

    @property
    def is_divided(self) -> bool:
        """Whether the part is a set of numbered files with an index."""
        return self.max_bytes is not None

    @abstractmethod
    def owned_shards(self) -> Iterator[TensorShard]:
        """Yield the shards that this rank writes."""

    def extra_shards(self) -> Iterator[TensorShard]:
        """Yield small tensors inside of values, which several ranks may have; one of them writes them."""
        yield from ()

    def extra_elsewhere(self) -> set[str]:
        """Return the names of those `extra_shards` that another rank writes; known when all have heard from all."""
        return set()

    def file_dtype(self, shard: TensorShard) -> torch.dtype:
        """Return the element type that a shard's tensor has in the file."""
        return shard.dtype

    def local_facts(self) -> Any:
        """Return what the other ranks have to know; it is pickled on the way."""
        return None

    @abstractmethod
    def learn(self, facts: Sequence[Any], rank: int) -> None:
        """Take in what every rank said, in rank order."""

    def learned_specs(self, facts: Any, rank: int) -> list[tuple[str, tuple[int, ...], torch.dtype, int]]:
        """Return the tensors that a rank owns only since all have heard from all; as `local_specs` lists others."""
        del facts, rank
        return []

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return the values, as encoded JSON, that go into the first file."""

    def texts(self) -> dict[str, str]:
        """Return further files and their content."""
        return {}


class ModelPart(Part):
    """A model's parameters, persistent buffers and extra state.

    Args:
        adapter: The model's state.
        names: How the files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file.
        file_name: Name of the one file, where it is not ``names.single``.
        dtype: Element type that floating tensors are written in; ``None`` leaves each as it is.
        texts: Further files and their content, such as ``config.json``.
        module: The user's own model; state that only its ``state_dict`` shows is refused.
    """

    def __init__(
        self,
        adapter: StateAdapter,
        names: FileNames,
        *,
        max_bytes: int | None = None,
        file_name: str | None = None,
        dtype: torch.dtype | None = None,
        texts: Mapping[str, str] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__(names, max_bytes=max_bytes, file_name=file_name)
        self._adapter = adapter
        self._module = module
        self._dtype = dtype
        self._texts = dict(texts or {})
        self._extra: dict[str, Any] = {}
        self._extra_tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._owners: dict[str, int] = {}
        self._mine: list[str] = []

    @override
    def owned_shards(self) -> Iterator[TensorShard]:
        for shard in self._adapter.model_shards():
            if shard.is_owner:
                yield shard

    @override
    def extra_shards(self) -> Iterator[TensorShard]:
        for tensors in self._extra_tensors.values():
            yield from whole_shards(tensors)

    @override
    def extra_elsewhere(self) -> set[str]:
        elsewhere = self._extra_tensors.keys() - set(self._mine)
        return {key for name in elsewhere for key in self._extra_tensors[name]}

    @override
    def file_dtype(self, shard: TensorShard) -> torch.dtype:
        is_state = any(shard.name in tensors for tensors in self._extra_tensors.values())
        if self._dtype is None or not shard.dtype.is_floating_point or is_state:
            return shard.dtype
        return self._dtype

    @override
    def local_facts(self) -> Any:
        if self._module is not None:
            check_model_is_saved_whole(self._module)
        self._extra_tensors = {}
        encoded = {}
        for name, value in self._adapter.extra_state().items():
            tensors: dict[str, torch.Tensor] = {}
            encoded[name] = encode_json(value, name, tensors)
            self._extra_tensors[name] = tensors
        shapes = {
            name: [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
            for name, tensors in self._extra_tensors.items()
        }
        return encoded, shapes

    @override
    def learn(self, facts: Sequence[Any], rank: int) -> None:
        self._extra, self._owners = {}, {}
        for owner, (encoded, _) in enumerate(facts):
            for name, value in encoded.items():
                if name not in self._extra:  # of modules that are everywhere, the first rank writes
                    self._extra[name] = value
                    self._owners[name] = owner
        self._mine = [name for name, owner in self._owners.items() if owner == rank]

    @override
    def learned_specs(self, facts: Any, rank: int) -> list[tuple[str, tuple[int, ...], torch.dtype, int]]:
        return [
            (key, shape, dtype, math.prod(shape))
            for name, tensors in facts[1].items()
            if self._owners[name] == rank
            for key, shape, dtype in tensors
        ]

    def extra_here(self) -> dict[str, Any]:
        """Return the extra state that this rank writes, not encoded."""
        here = self._adapter.extra_state()
        return {name: here[name] for name in self._mine}

    @override
    def values(self) -> dict[str, Any]:
        return dict(sorted(self._extra.items()))

    @override
    def texts(self) -> dict[str, str]:
        return self._texts


def whole_shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorShard]:
    """Yield one shard for each tensor that this rank holds whole."""
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        yield TensorShard(name=key, global_shape=shape, dtype=tensor.dtype, box=full_box(shape), data=tensor.detach())


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo:
    """An optimizer's state, its tensors left out.

    Args:
        groups: Parameter groups.
        scalars: State that is not a tensor, by parameter and state name.
        shapes: The shape of each parameter.
    """

    groups: tuple[ParamGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    shapes: Mapping[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON, ordered by name: the file does not depend on which rank held what."""
        return {
            "format_version": FORMAT_VERSION,
            "param_groups": [
                {
                    "params": sorted(group.params, key=natural_order),
                    **{key: encode_json(group.options[key], key) for key in sorted(group.options)},
                }
                for group in self.groups
            ],
            "scalars": {
                name: {state: encode_json(states[state], f"{name}/{state}") for state in sorted(states)}
                for name, states in sorted(self.scalars.items(), key=lambda item: natural_order(item[0]))
            },
            "param_shapes": {name: list(self.shapes[name]) for name in sorted(self.shapes, key=natural_order)},
        }

    @classmethod
    def from_json(cls, content: Any, where: str) -> OptimizerInfo:
        """Return what `to_json` was made of.

        Raises:
            CheckpointError: If the content is something else; ``where`` names its file.
        """
        try:
            if content["format_version"] > FORMAT_VERSION:
                msg = (
                    f"'{where}' has format version {content['format_version']}; this Booster reads up to "
                    f"{FORMAT_VERSION}."
                )
                raise CheckpointError(msg)
            groups = tuple(
                ParamGroup(
                    params=_names(group["params"]),
                    options={key: decode_json(item) for key, item in group.items() if key != "params"},
                )
                for group in _list(content["param_groups"])
            )
            scalars = {
                name: {state: decode_json(value) for state, value in states.items()}
                for name, states in content["scalars"].items()
            }
            shapes = {name: _shape(shape) for name, shape in content["param_shapes"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            msg = f"'{where}' does not describe an optimizer's parameter groups: {error!r}."
            raise CheckpointError(msg) from error
        return cls(groups=groups, scalars=scalars, shapes=shapes)

    @classmethod
    def of(cls, adapter: StateAdapter) -> OptimizerInfo:
        """Return what this rank knows."""
        groups = tuple(adapter.param_groups())
        members = {name for group in groups for name in group.params}
        return cls(
            groups=groups,
            scalars=adapter.optimizer_scalars(),
            shapes={shard.name: shard.global_shape for shard in adapter.model_shards() if shard.name in members},
        )

    @classmethod
    def merge(cls, infos: Sequence[OptimizerInfo]) -> OptimizerInfo:
        """Return what all ranks know together: a rank may hold only some of the parameters.

        Raises:
            CheckpointError: If ranks disagree about a group's options.
        """
        groups = []
        for index in range(max(len(info.groups) for info in infos)):
            present = [info.groups[index] for info in infos if index < len(info.groups)]
            params = tuple(dict.fromkeys(name for group in present for name in group.params))
            options = present[0].options
            for group in present[1:]:
                if group.options != options and encode_json(dict(group.options), "") != encode_json(dict(options), ""):
                    msg = f"Ranks disagree about parameter group {index}: {dict(options)} and {dict(group.options)}."
                    raise CheckpointError(msg)
            groups.append(ParamGroup(params=params, options=options))
        scalars: dict[str, dict[str, Any]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for info in infos:
            shapes |= info.shapes
            for name, states in info.scalars.items():
                scalars.setdefault(name, {}).update(states)
        return cls(groups=tuple(groups), scalars=scalars, shapes=shapes)


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        msg = f"a list was expected, not a {type(values).__name__}"
        raise TypeError(msg)
    return values


def _names(values: Any) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in _list(values)):
        msg = "names are text"
        raise TypeError(msg)
    return tuple(values)


def _shape(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in _list(values)):
        msg = "sizes are numbers"
        raise TypeError(msg)
    return tuple(values)


class OptimizerPart(Part):
    """An optimizer's tensors, parameter groups and other state.

    Args:
        adapter: The optimizer's state.
        names: How the files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file, with the groups inside.
        file_name: Name of the one file, where it is not ``names.single``.
    """

    def __init__(
        self,
        adapter: StateAdapter,
        names: FileNames,
        *,
        max_bytes: int | None = None,
        file_name: str | None = None,
    ) -> None:
        super().__init__(names, max_bytes=max_bytes, file_name=file_name)
        self._adapter = adapter
        self._info: dict[str, Any] = {}

    @override
    def owned_shards(self) -> Iterator[TensorShard]:
        for shard in self._adapter.optimizer_shards():
            if shard.is_owner:
                yield shard

    @override
    def local_facts(self) -> Any:
        check_optimizer_is_saved_whole(self._adapter.unsaved_state())
        return OptimizerInfo.of(self._adapter)

    @override
    def learn(self, facts: Sequence[Any], rank: int) -> None:
        del rank
        self._info = OptimizerInfo.merge(facts).to_json()

    @override
    def values(self) -> dict[str, Any]:
        return {} if self.is_divided else {"optimizer": self._info}

    @override
    def texts(self) -> dict[str, str]:
        return {self.names.groups: json.dumps(self._info, indent=1) + "\n"} if self.is_divided else {}
