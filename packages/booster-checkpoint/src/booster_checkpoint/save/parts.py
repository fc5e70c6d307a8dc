"""The parts of a save: a model's or an optimizer's state, as named tensors and other values.

Every rank tells the others what they have to know of its part, and what all have told is merged. Which tensors all
ranks own together is found in `booster_checkpoint.save.plan`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from booster_checkpoint.files.quantized import without_quantization
from booster_checkpoint.files.safetensors_file import holds_low_bits
from booster_core.state import (
    NamedTensors,
    OptimizerInfo,
    TensorShard,
    check_model_is_saved_whole,
    check_optimizer_is_saved_whole,
    encode_json,
    full_box,
    has_adapters,
    library_of,
    own_class,
    without_adapters,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch
    from torch import nn

    from booster_checkpoint.files.names import FileNames
    from booster_checkpoint.files.transformers import PretrainedNames
    from booster_core.state import StateAdapter

OwnedSpec = tuple[str, tuple[int, ...], "torch.dtype", int]
"""A tensor's name, shape, dtype in the file, and number of elements that a rank writes."""


@dataclass(frozen=True, kw_only=True)
class MergedPart:
    """What all ranks together write of a part, besides the tensors that they own, and what of it this rank has.

    Args:
        values: Encoded JSON, which goes into the first file.
        texts: Further files and their content.
        specs: Tensors inside of values. Several ranks may have one; one of them writes it.
        mine: Names of the values that this rank was the first to have.
        elsewhere: Names of tensors inside of values that this rank has, and another one writes.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    specs: Sequence[OwnedSpec] = ()
    mine: Sequence[str] = ()
    elsewhere: Collection[str] = ()


class Part(ABC):
    """State that is written under one set of file names.

    Args:
        names: How its files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file.
        file_name: Name of the one file, where it is not ``names.single``.
        folder: The folder of its files, inside of that of the save; ``""`` is that itself.

    Attributes:
        is_alone: Whether the folder is this part's, though it is one file: other forms there are removed.
    """

    def __init__(
        self, names: FileNames, *, max_bytes: int | None = None, file_name: str | None = None, folder: str = ""
    ) -> None:
        self.names = names
        self.max_bytes = max_bytes
        self.file_name = file_name
        self.folder = folder
        self.is_alone = False

    def place_of(self, name: str) -> str:
        """Return the name that a file of this part has in the folder of the save."""
        return f"{self.folder}/{name}" if self.folder else name

    @property
    def is_divided(self) -> bool:
        """Whether the part is a set of numbered files with an index."""
        return self.max_bytes is not None

    @property
    def has_folder(self) -> bool:
        """Whether the part is what its folder is read as, in one file or several."""
        return self.is_divided or self.is_alone

    @property
    def keeps_values(self) -> bool:
        """Whether a shard's values stay where they are when the next shard is asked for."""
        return False

    @abstractmethod
    def owned_shards(self) -> Iterator[TensorShard]:
        """Yield the shards that this rank writes."""

    def extra_shards(self) -> Iterator[TensorShard]:
        """Yield the small tensors inside of values that `facts` has found."""
        yield from ()

    def file_dtype(self, shard: TensorShard) -> torch.dtype:
        """Return the element type that a shard's tensor has in the file."""
        return shard.dtype

    def aliases(self) -> Mapping[str, str]:
        """Return, for each further name of a tied tensor, the first name."""
        return {}

    @abstractmethod
    def facts(self) -> list[Any]:
        """Look at the state, and return what the other ranks have to know.

        Returns:
            As many entries on every rank; each is pickled on the way.
        """

    @abstractmethod
    def merge(self, facts: Sequence[Sequence[Any]], rank: int) -> MergedPart:
        """Return what all ranks together write.

        Args:
            facts: What `facts` returned on every rank, in rank order; entries that are equal are the same object.
            rank: This rank.

        Raises:
            CheckpointError: If ranks contradict each other.
        """


class ModelPart(Part):
    """A model's parameters, persistent buffers and extra state.

    Args:
        adapter: The model's state.
        names: How the files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file.
        file_name: Name of the one file, where it is not ``names.single``.
        folder: See `Part`.
        dtype: Element type that floating tensors are written in, for all or by their names in the model; those without
            one are written as they are.
        texts: Further files and their content.
        left_out: Names of tensors that are not written.
        module: The user's own model. State that only its ``state_dict`` shows is refused. Into a folder goes its
            ``config.json``, and a model of transformers gets the names and shapes of its published files.
    """

    def __init__(
        self,
        adapter: StateAdapter,
        names: FileNames,
        *,
        max_bytes: int | None = None,
        file_name: str | None = None,
        folder: str = "",
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        texts: Mapping[str, str] | None = None,
        left_out: Collection[str] = (),
        module: nn.Module | None = None,
    ) -> None:
        super().__init__(names, max_bytes=max_bytes, file_name=file_name, folder=folder)
        self._adapter = adapter
        self._module = module
        self._dtype = dtype
        self._dtype_of: dict[str, torch.dtype] = {}  # by the names in files
        self._texts = dict(texts or {})
        self._left_out = frozenset(left_out)
        self._extra_tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._names_in_files: PretrainedNames | None = None

    @property
    @override
    def keeps_values(self) -> bool:
        return self._adapter.keeps_values

    @property
    def is_pretrained(self) -> bool:
        """Whether the model is of a library whose ``from_pretrained`` reads a folder; not one with adapters."""
        has_method = callable(getattr(self._module, "save_pretrained", None))
        has_config = library_of(self._module) is not None or hasattr(
            getattr(self._module, "config", None), "to_json_string"
        )
        return self._module is not None and has_method and not has_adapters(self._module) and has_config

    @override
    def owned_shards(self) -> Iterator[TensorShard]:
        by_name = self._dtype if isinstance(self._dtype, Mapping) else None
        for shard in self._adapter.model_shards() if by_name is None else self._adapter.export_shards(by_name):
            if shard.is_owner and shard.name not in self._left_out:
                for part in [shard] if self._names_in_files is None else self._names_in_files.shards(shard):
                    self._dtype_of[part.name] = self._dtype_in_file(shard)
                    yield part

    @override
    def extra_shards(self) -> Iterator[TensorShard]:
        for tensors in self._extra_tensors.values():
            yield from whole_shards(tensors)

    @override
    def file_dtype(self, shard: TensorShard) -> torch.dtype:
        is_state = any(shard.name in tensors for tensors in self._extra_tensors.values())
        return shard.dtype if is_state else self._dtype_of.get(shard.name) or self._dtype_in_file(shard)

    def _dtype_in_file(self, shard: TensorShard) -> torch.dtype:
        if self._dtype is None or not shard.dtype.is_floating_point:
            return shard.dtype
        return self._dtype.get(shard.name, shard.dtype) if isinstance(self._dtype, Mapping) else self._dtype

    @override
    def facts(self) -> list[Any]:
        if self._module is not None:
            check_model_is_saved_whole(self._module, self._left_out)
            if self.has_folder and not self._left_out:
                self._texts |= pretrained_files(self._module, self._first_dtype())
                if library_of(self._module) == "transformers":
                    from booster_checkpoint.files.transformers import PretrainedNames

                    self._names_in_files = PretrainedNames.of(self._module)
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
        return [encoded, shapes]

    def _first_dtype(self) -> torch.dtype | None:
        """Return the format of the model's first floating parameter in the file, where that is not its own."""
        if not isinstance(self._dtype, Mapping):
            return self._dtype
        buffers = NamedTensors.of(self._module).buffers if self._module is not None else set[str]()
        return next((at for name, at in self._dtype.items() if name not in buffers and at.is_floating_point), None)

    @override
    def merge(self, facts: Sequence[Sequence[Any]], rank: int) -> MergedPart:
        values, mine, specs = dict[str, Any](), list[str](), list[OwnedSpec]()
        for owner, (encoded, shapes) in enumerate(facts):
            for name, value in encoded.items():
                if name not in values:  # of modules that are everywhere, the first rank writes
                    values[name] = value
                    mine += [name] if owner == rank else []
                    specs += [(key, shape, dtype, math.prod(shape)) for key, shape, dtype in shapes[name]]
        elsewhere = {key for name, tensors in self._extra_tensors.items() if name not in mine for key in tensors}
        return MergedPart(
            values=dict(sorted(values.items())), texts=self._texts, specs=specs, mine=mine, elsewhere=elsewhere
        )

    @override
    def aliases(self) -> Mapping[str, str]:
        return self._adapter.tied_names()

    def extra_state(self) -> Mapping[str, Any]:
        """Return the extra state of this rank's modules, not encoded."""
        return self._adapter.extra_state()


def whole_shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorShard]:
    """Yield one shard for each tensor that this rank holds whole."""
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        yield TensorShard(name=key, global_shape=shape, dtype=tensor.dtype, box=full_box(shape), data=tensor.detach())


class OptimizerPart(Part):
    """An optimizer's tensors, parameter groups and other state.

    Args:
        adapter: The optimizer's state.
        names: How the files are called.
        max_bytes: Largest size of a file's values; ``None`` writes one file, with the groups inside.
        file_name: Name of the one file, where it is not ``names.single``.
        folder: See `Part`.
    """

    def __init__(
        self,
        adapter: StateAdapter,
        names: FileNames,
        *,
        max_bytes: int | None = None,
        file_name: str | None = None,
        folder: str = "",
    ) -> None:
        super().__init__(names, max_bytes=max_bytes, file_name=file_name, folder=folder)
        self._adapter = adapter

    @property
    @override
    def keeps_values(self) -> bool:
        return self._adapter.keeps_values

    @override
    def owned_shards(self) -> Iterator[TensorShard]:
        for shard in self._adapter.optimizer_shards():
            if shard.is_owner:
                yield shard

    @override
    def facts(self) -> list[Any]:
        check_optimizer_is_saved_whole(self._adapter)
        return OptimizerInfo.of(self._adapter).entries()

    @override
    def merge(self, facts: Sequence[Sequence[Any]], rank: int) -> MergedPart:
        info = OptimizerInfo.merge(facts).to_json()
        if self.is_divided:
            return MergedPart(texts={self.names.groups: json.dumps(info, indent=1) + "\n"})
        return MergedPart(values={"optimizer": info})


def pretrained_files(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the configuration files of a model that has some, by name.

    Args:
        model: The user's own model. It is not changed.
        dtype: The dtype that its weights are written in, where it is not their own.
    """
    model = without_adapters(model)
    files = _config_of(model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        if hasattr(config, "architectures"):
            config.architectures = [own_class(model).__name__]
            floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
            kept = dtype or (floating[0] if floating else None)
            if kept is not None:
                config.dtype = str(kept).removeprefix("torch.")
        text: str = config.to_json_string()
        if "quantization_config" in text and not holds_low_bits(model):  # of the release that the model was read from
            text = json.dumps(without_quantization(json.loads(text)), indent=2, sort_keys=True) + "\n"
        files["config.json"] = text
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string") and getattr(model, "can_generate", lambda: False)():
        files["generation_config.json"] = generation.to_json_string()
    return files


def _config_of(model: nn.Module) -> dict[str, str]:
    """Return the configuration file of a model of diffusers or with the Hub's mixin, by its name."""
    library, of_library = library_of(model), cast("Any", model)
    content: Any = None
    if library == "diffusers":
        content = {**json.loads(of_library.to_json_string()), "_class_name": own_class(model).__name__}
    elif library == "huggingface_hub":
        content = of_library._hub_mixin_config  # noqa: SLF001 - what its `save_pretrained` writes
        content = dataclasses.asdict(content) if dataclasses.is_dataclass(content) else content  # type: ignore[arg-type]
    name: str = getattr(model, "config_name", None) or "config.json"
    return {} if content is None else {name: json.dumps(content, indent=2, sort_keys=True) + "\n"}
