"""Means over labels that count, in the microbatches of a pipeline: divided by what counts in the whole batch.

The loss of a microbatch counts by its samples, so that the mean of cross entropies over labels that are not -100 would
be another one than that of one process. So a sum is divided by the batch's share of such labels. Which labels the other
microbatches will have follows from those of the batch that this one's are equal to, as they are or shifted by one.
Labels that a model makes of something else are divided by their own number; whether that was right is known in the end.
So it is of a criterion that divides by a number of its own, as `(losses * mask).sum() / mask.sum()` does, which
trainers of language models with rewards do: the number of each microbatch is compared with the others'.
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from booster_core.errors import ConfigError
from booster_hybrid.torch_functions import name_of, outside_of_graphs
from booster_runtime.data import leaves_by_path
from booster_runtime.label_means import count_labels, labels_of_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_TOLERANCE = 1e-5
"""Rounding of counts in fp32."""


def _means() -> dict[Any, inspect.Signature]:
    names = ("cross_entropy", "nll_loss", "linear_cross_entropy")
    found = (getattr(functional, name, None) for name in names)
    return {each: inspect.signature(each) for each in found if each is not None}


MEANS = _means()
"""Functions that return a mean over labels by default, and their arguments; the last one is new in torch 2.13."""


@outside_of_graphs
def mean_of_batch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of `MEANS`; its mean is divided by what `labels_of_mean` returns."""
    bound = MEANS[func].bind(*args, **kwargs)
    given: dict[str, Any] = {**bound.arguments}
    target, weight, ignored = given["target"], given.get("weight"), given.get("ignore_index")
    is_legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if given.get("reduction", "mean") != "mean" or is_legacy or target.is_floating_point():
        return func(*args, **kwargs)
    given["reduction"] = "sum"
    if given["input"].dtype == torch.float16:  # whose range a sum leaves
        given["input"] = given["input"].float()
    total = func(**given)
    count = labels_of_mean(target, -100 if ignored is None else ignored, weight)
    return total / count.to(torch.promote_types(total.dtype, torch.float32))


class CountedLoss(TorchFunctionMode):
    """Lets a criterion inside take means by `mean_of_batch`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function."""
        del types
        return mean_of_batch(func, args, kwargs or {}) if func in MEANS else func(*args, **(kwargs or {}))


_SCALING = frozenset(
    (
        *("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
        *("div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__", "__rdiv__"),
    )
)
_NUMBERS = frozenset(("item", "tolist", "__int__", "__float__", "__index__"))
_MEANS_OF_ALL = frozenset(("mean", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"))


class _Origin(enum.Enum):
    """What a tensor of a criterion is made of."""

    BATCH = enum.auto()
    """The microbatch alone."""
    OUTPUTS = enum.auto()
    """The model's outputs."""
    SELECTED = enum.auto()
    """Those of the outputs that a mask chooses."""


class CountedCriterion(CountedLoss):
    """Notes what a criterion scales by and makes of the microbatch alone, such as the number of tokens in a mask.

    Args:
        means: Compares these numbers with those of the other microbatches.
        outputs: What the criterion gets of the model.
        microbatch: What it gets of the data.
    """

    def __init__(self, means: LabelMeans, outputs: Any, microbatch: Any) -> None:
        super().__init__()
        self._means = means
        self._origins: dict[int, tuple[weakref.ref[Tensor], _Origin]] = {}
        for origin, values in ((_Origin.BATCH, microbatch), (_Origin.OUTPUTS, outputs)):
            self._note(_tensors([leaf for _, leaf in leaves_by_path(values)[0]]), origin)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function."""
        result = super().__torch_function__(func, types, args, kwargs)
        if not torch.compiler.is_compiling():
            self._follow(name_of(func), (*args, *(kwargs or {}).values()), kwargs or {}, result)
        return result

    def _follow(self, name: str, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        operands = _tensors(given)
        origins = [self._origin(each) for each in operands]
        found = [each for each in origins if each is not None]
        if not found:
            return
        numbers = [
            each
            for each, origin in zip(operands, origins, strict=True)
            if origin is _Origin.BATCH and not each.dim() and not each.is_complex()
        ]
        if numbers and (name in _NUMBERS or (name in _SCALING and len(numbers) < len(operands))):
            self._means.scaled(numbers[0].detach())
        if _Origin.SELECTED in found and (name in _MEANS_OF_ALL or name.endswith("_loss")):
            chosen = operands[origins.index(_Origin.SELECTED)]
            if named.get("reduction", "mean") == "mean" and isinstance(result, torch.Tensor) and not result.dim():
                self._means.scaled(torch.tensor(chosen.numel(), device=chosen.device))
        origin = max(found, key=lambda each: each.value)
        is_masked = _Origin.BATCH in found and name in ("__getitem__", "masked_select")
        if origin is _Origin.OUTPUTS and is_masked and any(each.dtype == torch.bool for each in operands[1:]):
            origin = _Origin.SELECTED
        self._note(_tensors((result,)), origin)

    def _note(self, tensors: list[Tensor], origin: _Origin) -> None:
        self._origins.update((id(each), (weakref.ref(each), origin)) for each in tensors)

    def _origin(self, tensor: Tensor) -> _Origin | None:
        known = self._origins.get(id(tensor))
        return None if known is None or known[0]() is not tensor else known[1]


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples of these."""
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += _tensors(each)
    return found


class LabelMeans:
    """Counts the labels of one batch, on the rank of the last stage.

    Args:
        parts: The microbatches.
        shares: What each one's loss counts.
    """

    def __init__(self, parts: Sequence[Any], shares: Sequence[float]) -> None:
        self._parts, self._shares = parts, shares
        self._totals: dict[Any, Tensor] = {}
        self._calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._scales: dict[int, list[tuple[Tensor, float]]] = {}
        self._index = self._num_calls = self._num_scales = 0

    @functools.cached_property
    def _labels(self) -> list[dict[str, Tensor]]:
        return [_integers(part) for part in self._parts]

    def begin(self, index: int) -> None:
        """Begin with a microbatch."""
        self._index, self._num_calls, self._num_scales = index, 0, 0

    def __call__(self, labels: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
        """Return what to divide the sum of a microbatch's losses by; see `booster_runtime.label_means`."""
        share, labels = self._shares[self._index], labels.detach()
        own = count_labels(labels, ignore_index, weight).double()
        total = own / share
        for path, is_shifted, candidate in _candidates(self._labels[self._index], labels, ignore_index):
            key = path, is_shifted, ignore_index, weight
            if key not in self._totals:
                parts = (_shifted(each[path], ignore_index) if is_shifted else each[path] for each in self._labels)
                counts = [count_labels(part, ignore_index, weight) for part in parts]
                self._totals[key] = torch.stack(counts).sum().double()
            total = torch.where((candidate == labels.reshape(-1)).all(), self._totals[key], total)
        self._calls.setdefault(self._num_calls, []).append((own, total))
        self._num_calls += 1
        return total * share

    def scaled(self, number: Tensor) -> None:
        """Note what the criterion multiplies or divides by, which is made of the microbatch alone."""
        self._scales.setdefault(self._num_scales, []).append((number.double(), self._shares[self._index]))
        self._num_scales += 1

    def differs(self) -> Tensor | None:
        """Return whether something was divided by another number than that of the batch; ``None`` without a mean."""
        found = []
        for scales in self._scales.values():
            numbers = torch.stack([number for number, _ in scales])
            parts = numbers / torch.tensor([share for _, share in scales], device=numbers.device, dtype=numbers.dtype)
            # Equal in all microbatches, or in proportion to their samples: the mean of their losses is the batch's.
            found.append(_are_different(numbers) & _are_different(parts))
        for calls in self._calls.values():
            own, totals = (torch.stack(each) for each in zip(*calls, strict=True))
            found.append(((totals - own.sum()).abs() > _TOLERANCE * own.sum()).any())
        return torch.stack(found).any() if found else None


def _are_different(numbers: Tensor) -> Tensor:
    return ((numbers - numbers[0]).abs() > _TOLERANCE * numbers[0].abs()).any()


def other_mean() -> ConfigError:
    """Return the error about a mean that is not that of the batch."""
    return ConfigError(
        "The loss is a mean over labels that count (not `ignore_index`), or is scaled by what the criterion makes of a "
        "microbatch, such as `mask.sum()`, of which microbatches have different numbers: the mean of the microbatches' "
        "means is not the batch's. Pass `weight=`, which counts them, to `train_batch`; put the labels into the batch "
        "as the loss takes them; or return a sum over what counts, divided by a number that is the same for all "
        "microbatches. Count outside of the criterion what is for logs alone: where a number goes can't be followed."
    )


def _integers(part: Any) -> dict[str, Tensor]:
    """Return the tensors that may be labels, by path: those that are called so, if any are."""
    found = {
        path: leaf
        for path, leaf in leaves_by_path(part)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.dtype in (torch.int64, torch.int32)
    }
    named = {path: leaf for path, leaf in found.items() if "label" in path or "target" in path}
    return named or found


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    return functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def _candidates(integers: dict[str, Tensor], labels: Tensor, ignore_index: int) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield what labels of a microbatch may be, flat, if they are as many."""
    for path, leaf in integers.items():
        if leaf.numel() == labels.numel():
            yield path, False, leaf.reshape(-1)
        if leaf.dim() > 1 and leaf.numel() == labels.numel():
            yield path, True, _shifted(leaf, ignore_index).reshape(-1)
        elif leaf.dim() > 1 and leaf[..., 1:].numel() == labels.numel():
            yield path, True, leaf[..., 1:].reshape(-1)
