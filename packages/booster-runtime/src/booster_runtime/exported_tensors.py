"""A boosted model's tensors, whole and under the names of its published files, a few at a time and without a file.

This is what an inference engine's weight update takes: pairs of a name and a tensor. Ranks agree once on what there is;
each bucket then travels as one buffer, to which every rank adds the bytes that it owns.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import unwrap_model
from booster_core.state import (
    TensorShard,
    full_box,
    named_modules,
    natural_order,
    slices_of,
    without_adapters,
)
from booster_runtime.whole_tensors import sum_owned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core import Booster
    from booster_core.state import StateAdapter


_BUCKET_BYTES = 1 << 28


def whole_parameters(
    booster: Booster,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    rank: int | None = None,
    merge_lora: bool = False,
    bucket_bytes: int = _BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and persistent buffers, whole, by the names that `Booster.save_model` writes.

    Example::

        engine.load_weights(whole_parameters(booster, model, dtype=torch.bfloat16))

    Args:
        booster: Of the run.
        model: The boosted model.
        dtype: Format of floating tensors. By default those of `Booster.save_model`; as there, values are those of the
            masters where they are wider.
        rank: The rank that gets the tensors; others get tensors without memory, on the device ``meta``. ``None`` gives
            them to all ranks.
        merge_lora: Add what adapters change to the weights of their layers, and leave the adapters out.
        bucket_bytes: Size of the tensors that are whole at once, except that one tensor may be larger.

    Yields:
        The name; the tensor, on the run's device, which the caller may keep. Tied tensors come once, by their first
        name. Every rank gets the same names, in the order of layers.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If ranks ask for different things, the rank or the size is no valid one, or adapters can't be
            merged: all that is not LoRA on linear layers in a floating format.

    Collective: every rank of the world, for each tensor: all ranks iterate to the end, or stop at the same place, and
    do not train in between.
    """
    coordinator = booster.context.coordinator
    boosted = booster.boosted_model(model, "whole_parameters")
    module = unwrap_model(boosted)
    coordinator.agree("whole_parameters", [str(dtype), rank, merge_lora, bucket_bytes])
    if bucket_bytes < 1 or (rank is not None and not 0 <= rank < coordinator.world_size):
        msg = f"`rank={rank}` of {coordinator.world_size} ranks or `bucket_bytes={bucket_bytes}` is out of range."
        raise ConfigError(msg)
    with coordinator.together("whole_parameters"):
        merges = _merges(module) if merge_lora else {}
    adapter = booster.state_adapter(boosted)
    formats = _Formats(booster.export_dtypes(boosted) or {}, dtype)
    shards = _OwnShards(adapter, formats)
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for of_rank, merges_of_rank in coordinator.all_gather_object((shards.forms, merges)):
        forms |= of_rank
        merges |= merges_of_rank
    in_files = booster.checkpoint_io.names_in_files(without_adapters(module))
    for bucket in _buckets(forms, merges, bucket_bytes):
        wanted = {name: forms[name] for group in bucket for name in group}
        tensors = sum_owned(shards.of(wanted), wanted, booster.device, rank)
        for name, *_ in bucket:
            tensor = tensors[name]
            for layer in merges.get(name, ()):
                tensor = layer.merged(tensor, tensors)
            yield from _as_in_files(name, tensor, in_files)


@dataclass(frozen=True)
class _Formats:
    """In which format each tensor is asked for."""

    by_name: Mapping[str, torch.dtype]
    dtype: torch.dtype | None

    @property
    def wanted(self) -> Mapping[str, torch.dtype]:
        """By name, as `StateAdapter.export_shards` takes them."""
        return {name: self.of(name, dtype) for name, dtype in self.by_name.items()}

    def of(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the format of a tensor, from its own."""
        if not own.is_floating_point:
            return own
        return self.by_name.get(name, own) if self.dtype is None else self.dtype


@dataclass(frozen=True)
class _Merge:
    """A linear layer's adapter: the names of its factors, and what their product is multiplied by."""

    down: str
    up: str
    scaling: float
    is_transposed: bool

    def merged(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a weight with the product of the factors, computed in fp32 or wider."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = (tensors[self.up].to(wide) @ tensors[self.down].to(wide)) * self.scaling
        return weight.to(wide).add_(product.t() if self.is_transposed else product).to(weight.dtype)


def _merges(model: nn.Module) -> dict[str, list[_Merge]]:
    """Return the active adapters of each weight, by its name.

    Raises:
        ConfigError: If there are none, or one that is not known here.
    """
    found: dict[str, list[_Merge]] = {}
    try:
        from peft.tuners.lora import Linear
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        named: list[Any] = []
    else:
        named = [
            (name, layer)
            for name, _, layer in named_modules(model)
            if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
    for name, layer in named:
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        variants = getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values())
        if type(layer) is not Linear or variants or weight is None or not weight.is_floating_point():
            msg = (
                f"'{name}' has an adapter of `{type(layer).__name__}`, and only LoRA on linear layers in a floating "
                "format is merged. Save the adapters by `booster.save_lora_as_pretrained`, and merge them by peft."
            )
            raise ConfigError(msg)
        found[f"{name}.weight"] = [
            _Merge(
                f"{name}.lora_A.{each}.weight",
                f"{name}.lora_B.{each}.weight",
                float(layer.scaling[each]),
                bool(layer.fan_in_fan_out),
            )
            for each in layer.active_adapters
            if each in layer.lora_A and not layer.merged
        ]
    if not found:
        msg = f"`{type(model).__name__}` has no adapters to merge. Leave out `merge_lora`."
        raise ConfigError(msg)
    return found


def _buckets(
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]], merges: Mapping[str, Sequence[_Merge]], limit: int
) -> Iterator[list[list[str]]]:
    """Yield groups of tensors, of a few that are needed together: a name to yield, and the factors of its adapters."""
    factors = {name for each in merges.values() for merge in each for name in (merge.down, merge.up)}
    bucket: list[list[str]] = []
    size = 0
    for name in sorted(forms, key=natural_order):
        if name in factors:
            continue
        group = [name, *(each for merge in merges.get(name, ()) for each in (merge.down, merge.up))]
        nbytes = sum(math.prod(forms[each][0]) * forms[each][1].itemsize for each in group)
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(group)
        size += nbytes
    if bucket:
        yield bucket


class _OwnShards:
    """What this rank owns of a model's tensors, listed again only where it is asked for out of order.

    Listing may move values, such as those of offloaded parameters, so each is used before the next is asked for.

    Args:
        adapter: The model's state.
        formats: In which they are asked for.
    """

    def __init__(self, adapter: StateAdapter, formats: _Formats) -> None:
        self._adapter, self._formats = adapter, formats
        self._listed: Iterator[TensorShard] = iter(())
        self._count: Counter[str] = Counter()
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for shard in self._owned():
            self._count[shard.name] += 1
            self.forms[shard.name] = shard.global_shape, formats.of(shard.name, shard.dtype)

    def _owned(self) -> Iterator[TensorShard]:
        return (shard for shard in self._adapter.export_shards(self._formats.wanted) if shard.is_owner)

    def of(self, names: Collection[str]) -> Iterator[TensorShard]:
        """Yield the shards of some tensors, each of which may have several."""
        num_left, seen = sum(self._count[name] for name in names), set[Any]()
        while num_left:
            shard = next(self._listed, None)
            if shard is None:
                self._listed = self._owned()
            elif shard.name in names and (key := (shard.name, shard.box, shard.flat)) not in seen:
                seen.add(key)
                num_left -= 1
                yield shard


def _as_in_files(
    name: str, tensor: Tensor, in_files: Callable[[TensorShard], Iterable[TensorShard]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what files hold of a tensor of the model, in memory of its own."""
    shape = tuple(tensor.shape)
    whole = TensorShard(name=name, global_shape=shape, dtype=tensor.dtype, box=full_box(shape), data=tensor)
    made: dict[str, Tensor] = {}
    for part in [whole] if in_files is None else in_files(whole):
        if part.name not in made:
            made[part.name] = torch.empty(part.global_shape, dtype=part.dtype, device=tensor.device)
        made[part.name][slices_of(part.box)] = part.data
    yield from made.items()
