"""The frozen parameters that a step leaves out, and how a load tells that the model has the same ones.

Their values are summed up as one number, a hash of each element with its place: ranks add theirs, whatever parts they
hold. Runs hold a base in other formats (ZeRO narrows it, autocast does not), so it is hashed as rounded to each
format of 16 bits that it can be rounded to once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from booster_core.errors import CheckpointError, shorten
from booster_core.state import NamedTensors, box_shape, is_contiguous, natural_order, regions_of, span_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor

    from booster_checkpoint.session import Session
    from booster_core.state import StateAdapter, TensorShard

_FORMS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bits": None}
_CHUNK_NUMEL = 1 << 22
"""Elements that are hashed at a time: each takes about 40 bytes meanwhile."""
_INDEX, _VALUE, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def frozen_part(session: Session, call: str, adapter: StateAdapter, module: nn.Module) -> dict[str, Any]:
    """Return what a step notes of the frozen parameters that it leaves out: names, and digests.

    Args:
        session: The ranks.
        call: What the user called.
        adapter: The model's shards.
        module: The user's own model.

    Collective: every rank.
    """
    tensors = NamedTensors.of(module).tensors.items()
    own = [name for name, each in tensors if isinstance(each, nn.Parameter) and not each.requires_grad]
    names = sorted({name for of_rank in session.gather(call, "", lambda: own) for name in of_rank}, key=natural_order)
    return {"names": names, "digests": _digests(session, adapter, set(names))}


def check_frozen(session: Session, call: str, adapter: StateAdapter, path: object, saved: Mapping[str, Any]) -> None:
    """Raise on every rank unless a model has the frozen parameters that a step was saved without.

    Args:
        session: The ranks.
        call: What the user called.
        adapter: The model's shards.
        path: The step.
        saved: What `frozen_part` returned.

    Raises:
        CheckpointError: If parameters are not there, or have other values.

    Collective: every rank.
    """
    here = session.gather(call, path, lambda: [shard.name for shard in adapter.model_shards()])
    lacking = sorted(set(saved["names"]).difference(*here))
    if lacking:
        msg = f"'{path}' was saved without frozen parameters that this model does not have: {shorten(lacking)}."
        raise CheckpointError(msg)
    found = _digests(session, adapter, set(saved["names"]))
    same_forms = [form for form, (_, numel) in found.items() if saved["digests"].get(form, (0, -1))[1] == numel]
    if same_forms in ([], ["bits"]) or any(found[form] != list(saved["digests"][form]) for form in same_forms):
        msg = (
            f"'{path}' was saved without its {len(saved['names'])} frozen parameters (`save_frozen=False`), and those "
            "of this model have other values. Load the base from the same files as the run that saved it, before "
            "`boost`, and freeze the same parameters."
        )
        raise CheckpointError(msg)


def _digests(session: Session, adapter: StateAdapter, names: Collection[str]) -> dict[str, list[int]]:
    """Return, by format, the sum of the hashes of all elements of some tensors, and the number of elements."""
    sums = dict.fromkeys(_FORMS, 0)
    counts = dict.fromkeys(_FORMS, 0)
    for shard in adapter.model_shards():
        if shard.name not in names or not shard.is_owner:
            continue
        for form in _forms_of(shard.dtype):
            counts[form] += shard.numel
            for values, index in _chunks(shard):
                sums[form] += _hash_sum(_bits(values, _FORMS[form]), index, shard.name)
    signed = [(number + 2**63) % 2**64 - 2**63 for number in sums.values()]
    total = session.total_over_ranks([*signed, *counts.values()])  # wraps around, as the sums do
    return {form: [total[place], total[place + len(_FORMS)]] for place, form in enumerate(_FORMS)}


def _forms_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in (torch.float32, torch.float64):
        return "bfloat16", "float16"
    return (str(dtype).removeprefix("torch."),) if dtype in _FORMS.values() else ("bits",)


def _chunks(shard: TensorShard) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values of a shard, and the place of each in the row-major flattened whole tensor."""
    flat = shard.data.detach().reshape(-1)
    for region in regions_of(shard.box, shard.flat_range):
        shape = box_shape(region.box)
        for start in range(0, region.numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, region.numel)
            index = torch.arange(start, stop, device=flat.device)
            if is_contiguous(shard.global_shape, region.box):
                index += span_of(shard.global_shape, region.box)[0]
            else:
                rest, index, stride = index, torch.zeros_like(index), 1
                for (first, _), size, whole in zip(
                    reversed(region.box), reversed(shape), reversed(shard.global_shape), strict=True
                ):
                    index += (rest % size + first) * stride
                    rest, stride = rest // size, stride * whole
            yield flat[region.start + start : region.start + stop], index


def _bits(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the bits of elements, as rounded to a format of 16 bits, in one integer each."""
    if dtype is not None:
        return values.to(dtype).view(torch.int16).long()
    rows = values.contiguous().view(-1, 1).view(torch.uint8).long()
    return sum(rows[:, byte] << (8 * byte % 64) for byte in range(rows.shape[1]))  # type: ignore[return-value]


def _hash_sum(bits: Tensor, index: Tensor, name: str) -> int:
    seed = xxhash.xxh3_64_intdigest(name.encode()) >> 1
    mixed = (index * _INDEX + seed) ^ (bits * _VALUE)
    mixed = (mixed ^ (mixed >> 31)) * _MIX
    return int((mixed ^ (mixed >> 29)).sum())
