"""A transformers model's tensors as its `save_pretrained` names and splits them, shard by shard.

Experts that the model holds in one tensor are written one by one, as published, so that every program that knows the
architecture reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.composed import Layout
from booster_checkpoint.files.transformers_operations import convert, is_known, pretrained_model
from booster_core.state import TensorMeta, TensorShard, box_shape, intersect, regions_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


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
        model = pretrained_model(module)
        if model is None:
            return None
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        # The order and the exceptions of transformers' own `revert_weight_conversion`.
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:
            found = get_model_conversion_mapping(model, add_legacy=False)
            prefix_change: Any = getattr(core_model_loading, "PrefixChange", ())  # transformers 5.5 has none
            conversions = [entry for entry in found if not isinstance(entry, prefix_change)]
        try:
            reversed_ones = [entry.reverse_transform() for entry in reversed(conversions)]
        except ValueError:  # quantized
            return None
        converters = [entry for entry in reversed_ones if isinstance(entry, WeightConverter)]
        if not converters or not all(is_known(entry) and len(entry.source_patterns) == 1 for entry in converters):
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
                made = convert(converter, file_name, {pattern: [whole]})
            self._layouts[name, meta] = {rename_source_key(key, self._renamings, [])[0]: at for key, at in made.items()}
        return self._layouts[name, meta]
