"""What differs between a training under a plugin and that of one process, as sentences for the page.

A tensor may differ from that of one process by the tolerance of its dtype, or by a few times the rounding error of
that process, which is its distance to the same training in fp64. Of gradients that is the largest of all steps: in one
step errors may happen to cancel, as in WavLM's third, where plain torch that computes the batch in two halves is
farther from one that computes it whole than four times that step's distance.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from zoo_training import STEPS, Reference

from booster_testing.compare import largest_difference, tolerance_for

if TYPE_CHECKING:
    from model_zoo import ZooModel

_NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""
_ZERO = 1e-9
"""Largest gradient, in fp64 and relative to the model's largest, of a parameter without effect on the loss."""
_ROUNDINGS = 4.0
"""Allowed error relative to that of one process: two ranks round as often, but in another order."""


def gradient_findings(ours: dict[str, Tensor], reference: Reference, step: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the gradient that differs most from that of one process, if one does."""
    rounded = list(zip(reference.plain.gradients, reference.exact.gradients, strict=True)) if reference.exact else []
    return _findings(
        f"gradient of step {step + 1}", ours, reference.plain.gradients[step], rounded, reference, step, zoo
    )


def parameter_findings(ours: dict[str, Tensor], reference: Reference, last: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the parameter that differs most: at the checkpoint (``last=0``) or one step later."""
    plain = reference.plain.parameters[last]
    rounded = [(plain, reference.exact.parameters[last])] if reference.exact else []
    # A step of this optimizer is at most a tenth of the gradient, so the tolerance of gradients holds for steps, too.
    return _findings(f"after step {STEPS + last}", ours, plain, rounded, reference, STEPS - 1 + last, zoo)


def _findings(
    what: str,
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    rounded: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    reference: Reference,
    step: int,
    zoo: ZooModel,
) -> list[str]:
    """Compare each tensor on its own scale, and those without effect on the loss on the model's scale."""
    if ours.keys() != plain.keys():
        return [f"{what}: other names, {', '.join(sorted(ours.keys() ^ plain.keys())[:3])}"]
    largest = max(float(value.abs().max()) for value in reference.plain.gradients[step].values() if value.numel())
    without = _without_effect(reference, step, zoo)
    beyond: dict[str, float] = {}
    for name, expected in plain.items():
        if ours[name].shape != expected.shape:
            return [f"{what}: shape of `{name}` is {tuple(ours[name].shape)}, not {tuple(expected.shape)}"]
        rounding = max((_difference(one[name], exact[name]) for one, exact in rounded), default=0.0)
        allowed = max(tolerance_for(reference.dtype).relative, _ROUNDINGS * rounding)
        difference = _difference(ours[name], expected)
        if name in without and float((ours[name] - expected).abs().max()) <= _NO_EFFECT * largest:
            continue
        if not difference <= allowed:
            beyond[name] = difference
    if not beyond:
        return []
    worst = max(beyond, key=lambda name: beyond[name])
    return [f"{what}: `{worst}` differs by {beyond[worst]:.1e} of its largest value ({len(beyond)} of {len(plain)} do)"]


def _without_effect(reference: Reference, step: int, zoo: ZooModel) -> set[str]:
    """Return the names of parameters whose gradients are zero except for rounding."""
    names = reference.plain.gradients[step].keys()
    listed = {name for name in names if any(fnmatch(name, pattern) for pattern in zoo.no_effect)}
    exact = reference.plain.gradients[step] if reference.dtype == torch.float64 else None
    if reference.exact is not None:
        exact = reference.exact.gradients[step]
    if exact is None:
        return listed
    largest = {name: float(value.abs().max()) for name, value in exact.items() if value.numel()}
    return listed | {name for name, value in largest.items() if value <= _ZERO * max(largest.values())}


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.is_complex():
        return largest_difference(torch.view_as_real(actual.detach()), torch.view_as_real(expected.detach()))
    return largest_difference(actual.detach(), expected.detach())


def same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a sentence for the first tensor or extra state that differs at all; NaNs are equal."""
    if ours.keys() != theirs.keys():
        return [f"other names: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"]
    for name, expected in theirs.items():
        actual = ours[name]
        if not isinstance(expected, Tensor):
            if actual != expected:
                return [f"`{name}` is {actual!r}, not {expected!r}"]
            continue
        if actual.dtype != expected.dtype or actual.shape != expected.shape:
            return [f"`{name}` is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
        if not torch.equal(_bits(actual), _bits(expected)):
            return [f"`{name}` differs by {_difference(actual, expected):.1e} of its largest value"]
    return []


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's values, with NaNs replaced."""
    return tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor.detach()
