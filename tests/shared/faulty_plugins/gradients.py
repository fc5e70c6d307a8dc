"""Mutants of `ReferencePlugin`, or of its optimizer, that get gradients, norms or overflows wrong."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePlugin
from typing_extensions import override

from booster_core.gradients import clip_by_norm
from booster_core.plugin import ModelWrapper

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class SumsGradients(ReferenceOptimizer):
    """Sums gradients over ranks in place of averaging them."""

    @override
    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class FlattensPresentGradients(ReferenceOptimizer):
    """Averages one buffer of the gradients that a rank has, whichever another rank has."""

    @override
    def average(self) -> None:
        if not self.has_local_gradients:
            return
        self.has_local_gradients = False
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.reduce(flat)
        for gradient, averaged in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


class WithoutAveraging(ReferenceOptimizer):
    """Steps with each rank's own gradients."""

    @override
    def average(self) -> None:
        pass


class KeepsLastMicroBatch(ReferenceOptimizer):
    """Keeps the gradients of the last micro-batch only."""

    @override
    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        self.optim.zero_grad()
        super().backward(loss, inputs, retain_graph=retain_graph)


class _ForgetsToAverage(ReferenceOptimizer):
    is_evaluated = False

    @override
    def average(self) -> None:
        if not self.is_evaluated:
            super().average()

    @override
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.is_evaluated = False
        return result


class _NotesEvaluation(ModelWrapper):
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self.boosted_optimizer
        if not self.training and optimizer is not None:
            optimizer.is_evaluated = True
        return super()._forward(*args, **kwargs)

    optimizer_class: ClassVar[type[ReferenceOptimizer]] = _ForgetsToAverage


class AveragesNoMoreAfterEvaluation(ReferencePlugin):
    """Does not average gradients between an evaluation and the next step."""

    model_class: ClassVar[type[ModelWrapper]] = _NotesEvaluation
    optimizer_class: ClassVar[type[ReferenceOptimizer]] = _ForgetsToAverage


class SyncsUnderNoSync(ReferencePlugin):
    """Communicates under ``no_sync`` as outside of it; the gradients are right."""

    @override
    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class NormOfOwnPart(ReferenceOptimizer):
    """Clips by the norm of the gradients that this rank counts, without adding the other ranks'."""

    @override
    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        gradients = self.gradients()
        own = gradients[dist.get_rank() :: dist.get_world_size()]
        return clip_by_norm(gradients, max_norm, norm_type, counted=own, error_if_nonfinite=error_if_nonfinite)


class IgnoresNormType(ReferenceOptimizer):
    """Clips by the Euclidean norm, whatever is asked for."""

    @override
    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        return super().clip_gradients(max_norm, 2.0, error_if_nonfinite=error_if_nonfinite)


class IgnoresErrorIfNonfinite(ReferenceOptimizer):
    """Does not raise where the norm is infinite."""

    @override
    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=False)


class HasNoEffectOfZeroGrad(ReferenceOptimizer):
    """Leaves gradients as they are when they are to be zeroed."""

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            super().zero_grad(set_to_none)


class DecidesOverflowLocally(ReferenceOptimizer):
    """Skips a step on the rank alone whose own gradients overflowed."""

    found_here = False

    @override
    def average(self) -> None:
        if self.has_local_gradients:
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            self.found_here = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        super().average()

    @override
    def overflow_anywhere(self, overflow: bool) -> bool:
        return self.found_here
