"""The names and shapes that transformers gives to a model's tensors in files, for loads and saves.

Since version 5, transformers names some models' modules differently from their published files, and holds the experts
of a mixture in one tensor where its files hold them one by one. It describes how by `WeightRenaming` and
`WeightConverter` objects: patterns of names, and operations that merge, split or transpose. Those that move boxes
around are done here by index arithmetic, on layouts instead of tensors; others (permuting for rotary embeddings) are
not known here, and such a model is saved under its modules' own names, which transformers reads just as well. Scripts
register conversions of their own by transformers' ``register_checkpoint_conversion_mapping``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.composed import Layout, chunks, concatenate, stack
from booster_core.errors import CheckpointError
from booster_core.state import TensorMeta, TensorShard, box_shape, intersect, regions_of, slices_of, without_adapters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import nn

_KNOWN = ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Transpose")


def named_in_model(module: nn.Module, stored: Mapping[str, Layout], known: Collection[str]) -> dict[str, Layout]:
    """Return a checkpoint's tensors by the names that they have in the model, as far as transformers knows these.

    Args:
        module: The user's own model.
        stored: The tensors by their names in the checkpoint.
        known: Names that the model has; these are never renamed.

    Raises:
        CheckpointError: If tensors that make up one of the model don't fit together.
    """
    named = dict(stored)
    model = _pretrained_model(without_adapters(module))
    if model is None:
        return named
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in sorted((key for key in stored if key not in known), key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters)
        if name not in known or name in named:
            continue
        if pattern is None:
            named[name] = named.pop(key)
        elif _is_known(converter_of[pattern]):
            groups.setdefault(name, (converter_of[pattern], {}))[1].setdefault(pattern, []).append(key)
    for name, (converter, keys) in groups.items():
        try:
            made = _convert(converter, name, {at: [stored[key] for key in found] for at, found in keys.items()})
        except ValueError as error:
            msg = f"'{name}' can't be made of {len(keys)} kinds of tensors as transformers describes it: {error}."
            raise CheckpointError(msg) from error
        for found in keys.values():
            for key in found:
                del named[key]
        named |= made
    return named


class PretrainedNames:
    """Gives shards of a model the names and shapes of its files.

    Args:
        converters: transformers' conversions, from the model to files.
        renamings: transformers' renamings, from the model to files.
    """

    def __init__(self, converters: list[Any], renamings: list[Any]) -> None:
        self._converters = converters
        self._renamings = renamings
        self._layouts: dict[tuple[str, TensorMeta], Mapping[str, Layout]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> PretrainedNames | None:
        """Return those of a model; ``None`` where its files have its modules' own names, or it is no such model.

        So they have where a conversion takes several of the model's tensors for one of a file, or does more than
        moving boxes: transformers reads the modules' names just as well.
        """
        model = _pretrained_model(module)
        if model is None:
            return None
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        # The order and the exceptions of transformers' own `revert_weight_conversion`.
        conversions = getattr(model, "_weight_conversions", None)
        is_dequantized = not getattr(model, "is_quantized", True)  # by the conversions, which would quantize it again
        if conversions is None or is_dequantized:
            found = get_model_conversion_mapping(model, add_legacy=False)
            prefix_change: Any = getattr(core_model_loading, "PrefixChange", ())  # transformers 5.5 has none
            conversions = [entry for entry in found if not isinstance(entry, prefix_change)]
        try:
            reversed_ones = [entry.reverse_transform() for entry in reversed(conversions)]
        except ValueError:  # quantized
            return None
        converters = [entry for entry in reversed_ones if isinstance(entry, WeightConverter)]
        if not converters or not all(_is_known(entry) and len(entry.source_patterns) == 1 for entry in converters):
            return None
        return cls(converters, [entry for entry in reversed_ones if isinstance(entry, WeightRenaming)])

    def shards(self, shard: TensorShard) -> Iterator[TensorShard]:
        """Yield the parts of files' tensors that a shard of the model holds; their data is the shard's."""
        layouts = self._files(shard.name, TensorMeta(shape=shard.global_shape, dtype=shard.dtype))
        ((first, layout), *more) = layouts.items()
        if not more and layout.single is not None:
            yield replace(shard, name=first)
            return
        for region in regions_of(shard.box, shard.flat):
            data = shard.data
            if shard.flat is not None:
                data = data[region.start : region.start + region.numel].view(box_shape(region.box))
            for name, layout in layouts.items():
                for piece in layout.pieces:
                    common = intersect(region.box, piece.stored(piece.box))
                    if common is not None:
                        box = piece.composed(common)
                        part = piece.arranged(data[slices_of(common, region.box)], box)
                        yield replace(shard, name=name, global_shape=layout.meta.shape, box=box, flat=None, data=part)

    def _files(self, name: str, meta: TensorMeta) -> Mapping[str, Layout]:
        """Return what the files hold of a tensor of the model."""
        if (name, meta) not in self._layouts:
            from transformers.core_model_loading import rename_source_key

            file_name, pattern = rename_source_key(name, [], self._converters)
            whole = Layout.of(name, meta)
            if pattern is None:
                made = {name: whole}
            else:
                converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
                made = _convert(converter, file_name, {pattern: [whole]})
            self._layouts[name, meta] = {rename_source_key(key, self._renamings, [])[0]: at for key, at in made.items()}
        return self._layouts[name, meta]


def _pretrained_model(module: nn.Module) -> Any:
    """Return a module that is a model of transformers, at least version 5; ``None`` for others."""
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return None
    del get_model_conversion_mapping, WeightConverter  # asked for to know that they are there
    return module if isinstance(module, PreTrainedModel) else None


def _is_known(converter: Any) -> bool:
    """Return whether all operations of a ``WeightConverter`` can be done on layouts."""
    return all(
        type(operation).__name__ in _KNOWN
        and getattr(operation, "num_shards_attribute", None) is None
        and not getattr(operation, "check_dims", False)
        for operation in converter.operations
    )


def _convert(converter: Any, name: str, collected: dict[str, list[Layout]]) -> dict[str, Layout]:
    """Return what ``WeightConverter.convert`` returns, of layouts.

    Args:
        converter: One whose operations are known.
        name: The name that ``rename_source_key`` gave to the tensors.
        collected: The tensors for each of the converter's source patterns, in the order of their names.

    Raises:
        CheckpointError: If tensors don't fit together.
        ValueError: If the operations are not meant for these patterns.
    """
    made: dict[str, list[Layout]] = collected
    for operation in converter.operations:
        made = _apply(operation, made, converter.source_patterns, converter.target_patterns)
    full_name = name.replace("*.", "0.")
    for pattern in made:
        if pattern in full_name:
            prefix, _, suffix = full_name.partition(pattern)
            return {f"{prefix}{target}{suffix}": layout for target, (layout,) in made.items()}
    return {target: layout for target, (layout,) in made.items()}


def _apply(
    operation: Any, made: dict[str, list[Layout]], sources: Sequence[str], targets: Sequence[str]
) -> dict[str, list[Layout]]:
    """Do one operation; names are patterns until the last one is done."""
    kind = type(operation).__name__
    if kind == "Transpose":
        ((whole,),) = made.values()
        if len(targets) > 1 < len(sources):
            msg = "a transposition of several tensors"
            raise ValueError(msg)
        return {(targets if len(targets) == 1 else sources)[0]: [whole.transpose(operation.dim0, operation.dim1)]}
    dim = operation.dim
    if kind == "MergeModulelist":
        return {targets[0] if len(made) == 1 else source: [stack(found, dim)] for source, found in made.items()}
    if kind == "Concatenate":
        return {targets[0]: [concatenate([layout for source in sources for layout in made.get(source, [])], dim)]}
    if kind == "Chunk":
        ((whole,),) = made.values()
        return {target: [part] for target, part in zip(targets, chunks(whole, len(targets), dim), strict=True)}
    split = {}
    for source, (whole,) in made.items():
        pattern = targets[0] if len(made) == 1 else source
        for index in range(whole.meta.shape[dim]):
            split[pattern.replace("*", str(index))] = [whole.select(dim, index)]
    return split
