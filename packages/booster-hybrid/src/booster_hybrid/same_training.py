"""Whether ranks that compute the same train the same: batches, parameters, their values, from whole ones.

A script may freeze a parameter on one rank, give ranks other random numbers, or put a penalty on parameters of which
each rank has a part. Ranks would diverge, or wait for each other, without a sign of why.
"""

from __future__ import annotations

import bisect
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, GradientError
from booster_core.ranks import digest
from booster_core.state import NamedTensors
from booster_hybrid.same_batch import BatchNumbers, different_batches
from booster_hybrid.tensor_parallel.tables import outside_of_layer, watch_tables
from booster_runtime import collectives
from booster_runtime.memory import is_absent
from booster_runtime.sharding import control_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from booster_hybrid.mesh import Axis
    from booster_hybrid.state import LocalModel

_MOST_LISTED = 4


class RequiresGradCheck:
    """Compares, in each forward, the batches of ranks that share one, and which parameters they train.

    The ranks' hosts exchange four numbers before the forward: those with other shapes would wait in its layers.

    Args:
        model: The user's model.
        replica: The ranks.
        device: Where the model computes.
    """

    def __init__(self, model: nn.Module, replica: Axis, device: torch.device) -> None:
        self._parameters = dict(model.named_parameters())
        self._replica = replica
        self._device = control_device(device, replica.group)
        self._batches = BatchNumbers()

    def check(self, batch: Any) -> None:
        """Raise on all ranks if they have different batches, or some train a parameter that others have frozen.

        Args:
            batch: What the model is called with; values on a device are compared in the next forward.

        Raises:
            ConfigError: If so, naming the ranks, or the first parameter.

        Collective: the ranks.
        """
        flags = bytes(parameter.requires_grad for parameter in self._parameters.values())
        number, trained = self._batches.take(batch), zlib.crc32(flags)
        told = torch.tensor([number, -number, trained, -trained], device=self._device)
        collectives.all_reduce(told, dist.ReduceOp.MAX, self._replica.group).wait()
        most, least, most_trained, least_trained = told.tolist()
        if most != -least:
            raise different_batches(list(self._replica.ranks))
        if most_trained != -least_trained:
            self._refuse_frozen(flags)

    def _refuse_frozen(self, flags: bytes) -> None:
        of_ranks = collectives.all_gather_object(flags, self._replica.group)
        for name, flags_of in zip(self._parameters, zip(*of_ranks, strict=True), strict=True):
            if len(set(flags_of)) > 1:
                frozen, trained = (
                    ", ".join(str(rank) for rank, own in zip(self._replica.ranks, flags_of, strict=True) if own == flag)
                    for flag in (0, 1)
                )
                msg = (
                    f"Parameter '{name}' is frozen on rank {frozen} and trained on rank {trained}, which work on one "
                    "batch together. Call `requires_grad_` alike on all ranks."
                )
                raise ConfigError(msg)


class DirectWeightUses:
    """Finds what a loss reads of parameters of which each rank has a part, elsewhere than where they are split.

    That is what was computed outside of the model's forward, but by a layer. Products with tables, and lookups in them,
    raise by themselves (`SplitTable`), in forward as well.

    Args:
        model: The user's model, split.
        parts: Names of such parameters, by ``id``.
    """

    def __init__(self, model: nn.Module, parts: Mapping[int, str]) -> None:
        self._parts = parts
        self._tables = watch_tables(model, parts)
        self._spans: list[tuple[int, int]] = []
        self._start = 0

    def begin(self) -> None:
        """Begin a forward of the model."""
        self._start = _next_number()

    def end(self) -> None:
        """End it."""
        self._spans.append((self._start, _next_number()))
        del self._spans[:-_MOST_SPANS]

    def check(self, loss: Tensor) -> None:
        """Raise if something in the graph of a loss reads such a parameter where it is not split.

        Raises:
            ConfigError: If so, on all ranks.
        """
        if loss.grad_fn is None or not self._spans:
            return
        for node, key in self._readers(loss.grad_fn):
            is_lookup = key in self._tables and node.name().startswith("EmbeddingBackward")
            if not (is_lookup or _is_ours(node) or self._is_inside(node)):
                raise outside_of_layer(self._parts[key], node.name())

    def _readers(self, root: Any) -> Iterator[tuple[Any, int]]:
        """Yield the nodes outside of the model's forward that read such parameters, with a parameter's ``id``."""
        waiting, seen = [root], {root}
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                key = id(getattr(following, "variable", None))
                if key in self._parts:
                    yield node, key
                elif following is not None and following not in seen and not self._is_inside(following):
                    seen.add(following)
                    waiting.append(following)

    def _is_inside(self, node: Any) -> bool:
        """Return whether a node was made in a forward of the model."""
        number = node._sequence_nr()  # noqa: SLF001 - no public way to tell when a node was made
        place = bisect.bisect_left(self._spans, (number, 0)) - 1
        return place >= 0 and number < self._spans[place][1]


_MOST_SPANS = 4096
"""Forwards that a loss may come of."""


def _is_ours(node: Any) -> bool:
    """Return whether a node is of a function that takes a part for a part: Booster's, or what it has compiled."""
    if node.name().startswith("CompiledFunction"):
        return True
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.startswith("booster_")


def _next_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    number: int = node._sequence_nr()  # noqa: SLF001 - no public way to tell when a node was made
    return number


def parts_of(model: nn.Module, local: LocalModel) -> dict[int, str]:
    """Return the names of the parameters of which this rank has a part, by ``id``.

    Args:
        model: The user's model, split.
        local: What is here of it.
    """
    names = NamedTensors.of(model).name_of
    shapes = local.whole_shapes(model)
    return {
        id(each): names[id(each)]
        for each in model.parameters()
        if not is_absent(each) and tuple(each.shape) != shapes[names[id(each)]]
    }


def check_copies(model: nn.Module, local: LocalModel, replica: Axis) -> None:
    """Raise on all ranks of a replica if what several of them hold of parameters differs.

    Args:
        model: The user's model, split.
        local: What is here of it.
        replica: The ranks.

    Raises:
        GradientError: If so, naming parameters and ranks.

    Collective: the ranks.
    """
    names = NamedTensors.of(model).name_of
    own = {}
    for parameter in model.parameters():
        name = names[id(parameter)]
        split = local.splits.get(name)
        if not is_absent(parameter) and (split is None or split.is_shared):
            own[name, None if split is None else split.ranges] = digest(parameter)
    seen: dict[Any, dict[bytes, list[int]]] = {}
    for rank, found in zip(replica.ranks, collectives.all_gather_object(own, replica.group), strict=True):
        for key, value in found.items():
            seen.setdefault(key, {}).setdefault(value, []).append(rank)
    apart = {name: list(by.values()) for (name, _), by in seen.items() if len(by) > 1}
    if not apart:
        return
    listed = [
        f"'{name}' (rank {' against rank '.join(', '.join(map(str, ranks)) for ranks in by)})"
        for name, by in list(apart.items())[:_MOST_LISTED]
    ]
    more = f" and {len(apart) - _MOST_LISTED} more" if len(apart) > _MOST_LISTED else ""
    msg = (
        f"After the first step {len(apart)} parameter(s) differ between ranks that hold the same: {', '.join(listed)}"
        f"{more}. These ranks have computed with other random numbers or other data, or the script has changed values "
        "or gradients on some of them only."
    )
    raise GradientError(msg)
