"""Whether ranks that hold the same values still do: `compare_parameters` before each save, and `ReplicaCheck`.

In the check, each rank hashes its own copy of parameters, buffers and optimizer state, and one small all-gather
compares the hashes. State that is put together for a checkpoint takes each value from the one rank that owns it, so a
drift between replicas would not show there.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from booster_core.errors import CheckpointError, ConfigError, GradientError, shorten
from booster_core.plugin import unwrap_model
from booster_core.ranks import digest, name_ranks
from booster_core.state import replica_digests
from booster_runtime.memory import is_absent

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from typing_extensions import Self

    from booster_core import Booster
    from booster_core.plugin import ModelWrapper, OptimizerWrapper
    from booster_core.ranks import DistCoordinator
    from booster_core.state import TensorShard

_Key = tuple[str, ...]
_MOST_LISTED = 10
_DRIFT = 1e-3
"""By how much of its norm a parameter's sums may differ between ranks: kernels that add up in no fixed order drift."""


def check_replicas(booster: Booster, model: nn.Module | None = None, every: int = 100) -> ReplicaCheck:
    """Compare replicas after every so many steps, and raise on every rank where they differ.

    Compared are parameters, buffers, optimizer state and random state, by hashes; each check reads all state once.

    Args:
        booster: Of the run.
        model: The boosted model; may be left out when one model is boosted.
        every: Number of steps between two checks.

    Returns:
        The check, which begins now; its ``check()`` compares at once, and ``close()``, or the end of a ``with``, ends
        it. At a difference it raises `GradientError`, which names tensors, ranks and steps.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If ``every`` is not positive, or the model is left out and not exactly one is boosted.

    Collective: the checks, on every rank of the world.
    """
    return ReplicaCheck(booster, booster.boosted_model(model, "check_replicas"), every)


class ReplicaCheck:
    """Compares replicas after every so many optimizer steps, and raises on every rank where they differ.

    A step is counted whenever the optimizer steps, skipped steps included. Compared are, bit for bit:

    - parameters that a rank holds whole, and every part of a parameter, buffer or optimizer state tensor that several
      ranks hold, as the plugin's ``state_adapter`` lists them;
    - torch's random state, among ranks that work on one batch together (tensor, pipeline and sequence parallel ranks).

    Running statistics of ``BatchNorm`` are left out: each data parallel rank updates its own from its own samples.

    Made by `check_replicas`; of several optimizers of a model, the steps of the last one are counted.

    Args:
        booster: Has boosted the model.
        model: The boosted model. A check that is never closed does not keep it, and ends with it.
        every: Number of steps between two checks, at least 1. A check reads all state once.

    Raises:
        ConfigError: If ``every`` is not positive.
    """

    def __init__(self, booster: Booster, model: ModelWrapper, every: int = 100) -> None:
        if every < 1:
            msg = f"`every={every}` is not a number of steps; use 1 or more."
            raise ConfigError(msg)
        self.every = every
        self.steps = 0
        self._coordinator = booster.context.coordinator
        self._model = weakref.ref(model)
        self._last_equal: int | None = None
        self._known: dict[int, list[_Key]] = {}
        for optimizer in model.boosted_optimizers[-1:]:
            optimizer.on_step.append(self._count)

    def __enter__(self) -> Self:
        """Return the check, which ends with the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Check no more."""
        self.close()

    def close(self) -> None:
        """Check no more; may be called repeatedly."""
        model = self._model()
        for optimizer in () if model is None else model.boosted_optimizers[-1:]:
            if self._count in optimizer.on_step:
                optimizer.on_step.remove(self._count)

    def _count(self, optimizer: OptimizerWrapper, metrics: dict[str, Any]) -> None:
        """Count a step, and check when its turn has come."""
        del optimizer, metrics
        self.steps += 1
        if self.steps % self.every == 0:
            self.check()

    def check(self) -> None:
        """Compare the replicas now.

        Raises:
            GradientError: If values that several ranks hold differ; names tensors, ranks and steps.
            ConfigError: If the model is no more.

        Collective: every rank of the world.
        """
        model = self._model()
        if model is None:
            msg = "There is nothing to compare: the model of this check is no more. Keep it, or close the check."
            raise ConfigError(msg)
        seen: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, digests in enumerate(self._gather(dict(self._digests(model)))):
            for key, number in digests:
                seen[key][number].append(rank)
        drifted = {key: list(ranks.values()) for key, ranks in seen.items() if len(ranks) > 1}
        if not drifted:
            self._last_equal = self.steps
            return
        since = (
            "this is the first check" if self._last_equal is None else f"they were equal after step {self._last_equal}"
        )
        listed = [f"{_name(key)} ({_groups(groups)})" for key, groups in list(drifted.items())[:_MOST_LISTED]]
        more = f" and {len(drifted) - _MOST_LISTED} more" if len(drifted) > _MOST_LISTED else ""
        msg = (
            f"Replicas of {len(drifted)} of {len(seen)} tensors differ after step {self.steps}; {since}: "
            f"{', '.join(listed)}{more}. Ranks that hold the same values must update them by the same gradients: look "
            "for code that changes parameters or buffers on some ranks only."
        )
        raise GradientError(msg)

    def _gather(self, own: dict[_Key, int]) -> list[Iterable[tuple[_Key, int]]]:
        """Return every rank's digests. Names travel once: afterwards a digest takes 8 bytes.

        Collective: every rank of the world.
        """
        names = _digest(repr(list(own)))
        gathered = self._coordinator.all_gather_object((names, array("Q", own.values()).tobytes()))
        # What was gathered is the same on every rank, so all of them know or miss the same names.
        if any(each not in self._known for each, _ in gathered):
            self._known.update(self._coordinator.all_gather_object((names, list(own))))
        return [zip(self._known[each], array("Q", digests), strict=True) for each, digests in gathered]

    def _digests(self, model: ModelWrapper) -> Iterator[tuple[_Key, int]]:
        """Yield a name and a hash of each value that another rank may hold too."""
        booster = model.boost_context.booster
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
        index, _ = booster.plugin.data_parallel_coordinates(self._coordinator)
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
