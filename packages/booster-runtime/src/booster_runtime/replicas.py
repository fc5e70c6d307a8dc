"""Whether ranks that hold the same values still do: `compare_parameters` before each save, and `check_replicas`.

In the check, each rank hashes its own copy of parameters, buffers and optimizer state, and one small all-gather
compares the hashes. State that is put together for a checkpoint takes each value from the one rank that owns it, so a
drift between replicas would not show there.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from booster_core.errors import CheckpointError, GradientError, shorten
from booster_core.plugin import unwrap_model
from booster_core.ranks import digest, name_ranks
from booster_core.state import replica_digests
from booster_runtime.memory import is_absent

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from booster_core import Booster
    from booster_core.plugin import ModelWrapper
    from booster_core.ranks import DistCoordinator
    from booster_core.state import TensorShard

_Key = tuple[str, ...]
_DRIFT = 1e-3
"""By how much of its norm a parameter's sums may differ between ranks: kernels that add up in no fixed order drift."""


def check_replicas(booster: Booster, model: nn.Module | None = None) -> None:
    """Raise on every rank if values that several ranks hold differ between them; reads all state once.

    Compared are, bit for bit:

    - parameters that a rank holds whole, and every part of a parameter, buffer or optimizer state tensor that several
      ranks hold, as the plugin's ``state_adapter`` lists them;
    - torch's random state, among ranks that work on one batch together (tensor, pipeline and sequence parallel ranks).

    Running statistics of ``BatchNorm`` are left out: each data parallel rank updates its own from its own samples.

    Example::

        if step % 100 == 0:
            check_replicas(booster, model)

    Args:
        booster: Of the run.
        model: The boosted model; may be left out when one model is boosted.

    Raises:
        GradientError: If values differ; names tensors and ranks.
        TypeError: If the model is not a boosted one.
        ConfigError: If the model is left out and not exactly one is boosted.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    digests = dict(_digests(booster, booster.boosted_model(model, "check_replicas"), coordinator))
    seen: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(coordinator.all_gather_object(digests, name="check_replicas")):
        for key, number in of_rank.items():
            seen[key][number].append(rank)
    drifted = {key: list(ranks.values()) for key, ranks in seen.items() if len(ranks) > 1}
    if drifted:
        listed = [f"{_name(key)} ({_groups(groups)})" for key, groups in drifted.items()]
        msg = (
            f"Replicas of {len(drifted)} of {len(seen)} tensors differ: {shorten(listed)}. Ranks that hold the same "
            "values must update them by the same gradients: look for code that changes parameters or buffers on some "
            "ranks only."
        )
        raise GradientError(msg)


def _digests(booster: Booster, model: ModelWrapper, coordinator: DistCoordinator) -> Iterator[tuple[_Key, int]]:
    """Yield a name and a hash of each value that another rank may hold too."""
    adapter = booster.state_adapter(model)
    module = unwrap_model(model)
    statistics = set(_running_statistics(module))
    shapes: dict[str, tuple[int, ...]] = {}

    def shards() -> Iterator[TensorShard]:
        for shard in adapter.model_shards():
            shapes[shard.name] = shard.global_shape
            if shard.name not in statistics:
                yield shard
        yield from adapter.optimizer_shards()

    yield from replica_digests(shards())
    for path, parameter in module.named_parameters():
        # What strategies compute with may be another tensor than what they save.
        if is_absent(parameter) or isinstance(parameter, DTensor):
            continue
        if type(parameter.data) is Tensor and tuple(parameter.shape) == shapes.get(path):
            yield ("parameter", path), _digest(parameter)
    index, _ = booster.plugin.data_parallel_coordinates(coordinator)
    yield ("random", str(index)), _digest(torch.get_rng_state())


def _running_statistics(module: nn.Module) -> Iterator[str]:
    for path, each in module.named_modules():
        if isinstance(each, nn.modules.batchnorm._NormBase) and not isinstance(each, nn.SyncBatchNorm):  # noqa: SLF001 - the base of all
            yield from (f"{path}.{name}" if path else name for name, _ in each.named_buffers(recurse=False))


def _digest(value: Any) -> int:
    """Return eight bytes of a value's digest as a number."""
    return int.from_bytes(digest(value)[:8], "little")


def _name(key: _Key) -> str:
    name, *rest = key
    if len(rest) == 1:  # a kind and what it is of
        return "torch's random state" if name == "random" else f"'{rest[0]}'"
    return f"'{rest[0]}' of '{name}'" if rest[0] else f"'{name}'"


def _groups(groups: list[list[int]]) -> str:
    """Say which ranks agree with each other."""
    return " against ".join("rank " + ", ".join(map(str, ranks)) for ranks in groups)


def compare_parameters(model: nn.Module, coordinator: DistCoordinator, parts: Container[int]) -> None:
    """Raise if ranks hold other values of a parameter that each has whole: a save takes each value from one of them.

    Compared are norms and sums, which a device computes in one pass. Where all ranks hold the same parameters, with the
    same bits of these, 16 bytes a rank travel; else, as between stages and where kernels add up in no fixed order, 24
    bytes a parameter.

    Args:
        model: The user's model.
        coordinator: Of the ranks.
        parts: The parameters of which this rank holds a part, by ``id``.

    Raises:
        CheckpointError: If so, on every rank, naming parameters and ranks.

    Collective: every rank of the world.
    """
    if coordinator.world_size == 1:
        return
    found = {_key(name): (name, each) for name, each in model.named_parameters() if _is_whole(each, parts)}
    sums = _sums([each for _, each in found.values()])
    told = array("Q", found).tobytes(), array("d", sums).tobytes()
    seen = hashlib.blake2b(b"".join(told), digest_size=16).digest()
    if len(set(coordinator.all_gather_object(seen, meets=False))) == 1:
        return
    first: dict[int, tuple[float, float]] = {}
    apart: dict[int, list[int]] = {}
    gathered = coordinator.all_gather_object(told, meets=False)
    for rank, (keys, numbers) in enumerate(gathered):
        values = array("d", numbers)
        for key, norm, total in zip(array("Q", keys), values[::2], values[1::2], strict=True):
            if not _is_near(first.setdefault(key, (norm, total)), (norm, total)):
                apart.setdefault(key, []).append(rank)
    if not apart:
        return
    names = {key: name for key, (name, _) in found.items() if key in apart}
    listed = {key: name for each in coordinator.all_gather_object(names, meets=False) for key, name in each.items()}
    ranks = name_ranks(sorted({rank for each in apart.values() for rank in each}))
    msg = (
        f"A save would write a mixture: {len(apart)} parameter(s) have other values on {ranks} than on the ranks "
        f"before that hold the same: {shorten(list(listed.values()))}. Change parameters on every rank alike, or send "
        "one rank's values to the others by `torch.distributed.broadcast` before the save."
    )
    raise CheckpointError(msg)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _is_whole(parameter: Tensor, parts: Container[int]) -> bool:
    return id(parameter) not in parts and not is_absent(parameter) and type(parameter.data) is Tensor


def _sums(parameters: list[Tensor]) -> list[float]:
    """Return the norm of each parameter, and its sum over the root of its length, which the norm bounds."""
    sums = []
    with torch.no_grad():
        for each in parameters:
            wide = torch.promote_types(each.dtype, torch.float32)
            values = torch.view_as_real(each) if wide.is_complex else each
            wide = wide.to_real()
            sums.append(torch.linalg.vector_norm(values.to(wide), dtype=wide).double())
            sums.append(values.sum(dtype=wide).double() / max(1, values.numel()) ** 0.5)
    # On the host at once: each copy would wait for the device.
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, each in enumerate(sums):
        by_device[each.device].append(index)
    found = [0.0] * len(sums)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = value
    return found


def _is_near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    bound = _DRIFT * max(one[0], other[0])
    return all(
        a == b or abs(a - b) <= bound or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )
