"""Mutants of `ReferencePlugin`, or of its optimizer, that get gradients, norms or overflows wrong."""

import contextlib

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePlugin

from booster_core.gradients import clip_by_norm
from booster_core.plugin import ModelWrapper


class SumsGradients(ReferenceOptimizer):
    """Sums gradients over ranks in place of averaging them."""

    def reduce(self, gradient):
        dist.all_reduce(gradient)


class SumsGradientsAfterTheFirstStep(ReferenceOptimizer):
    """Averages gradients in the first step, and sums them in later ones."""

    def reduce(self, gradient):
        dist.all_reduce(gradient)
        if not self.num_steps:
            gradient /= dist.get_world_size()


class FlattensPresentGradients(ReferenceOptimizer):
    """Averages one buffer of the gradients that a rank has, whichever another rank has."""

    def average(self):
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

    def average(self):
        pass


class KeepsLastMicroBatch(ReferenceOptimizer):
    """Keeps the gradients of the last micro-batch only."""

    def backward(self, loss, inputs=None, *, retain_graph=False):
        self.optim.zero_grad()
        super().backward(loss, inputs, retain_graph=retain_graph)


class _ForgetsToAverage(ReferenceOptimizer):
    is_evaluated = False

    def average(self):
        if not self.is_evaluated:
            super().average()

    def step(self, closure=None):
        result = super().step(closure)
        self.is_evaluated = False
        return result


class _NotesEvaluation(ModelWrapper):
    def _forward(self, *args, **kwargs):
        optimizer = self.boosted_optimizer
        if not self.training and optimizer is not None:
            optimizer.is_evaluated = True
        return super()._forward(*args, **kwargs)

    optimizer_class = _ForgetsToAverage


class AveragesNoMoreAfterEvaluation(ReferencePlugin):
    """Does not average gradients between an evaluation and the next step."""

    model_class = _NotesEvaluation
    optimizer_class = _ForgetsToAverage


class SyncsUnderNoSync(ReferencePlugin):
    """Communicates under ``no_sync`` as outside of it; the gradients are right."""

    def no_sync(self, model):
        return contextlib.nullcontext()


class SyncsModelThatWasBoostedFirst(ReferencePlugin):
    """Knows the optimizer of the last model only, which any ``no_sync`` is for; the gradients are right."""

    def configure(self, objects, context):
        boosted = super().configure(objects, context)
        self.last_optimizer = boosted.optimizer
        return boosted

    def no_sync(self, model):
        last = self.last_optimizer
        return last.accumulating() if isinstance(last, ReferenceOptimizer) else super().no_sync(model)


class NormOfOwnPart(ReferenceOptimizer):
    """Clips by the norm of the gradients that this rank counts, without adding the other ranks'."""

    def clip_gradients(self, max_norm, norm_type, *, error_if_nonfinite):
        gradients = self.gradients()
        own = gradients[dist.get_rank() :: dist.get_world_size()]
        return clip_by_norm(gradients, max_norm, norm_type, counted=own, error_if_nonfinite=error_if_nonfinite)


class IgnoresNormType(ReferenceOptimizer):
    """Clips by the Euclidean norm, whatever is asked for."""

    def clip_gradients(self, max_norm, norm_type, *, error_if_nonfinite):
        return super().clip_gradients(max_norm, 2.0, error_if_nonfinite=error_if_nonfinite)


class IgnoresErrorIfNonfinite(ReferenceOptimizer):
    """Does not raise where the norm is infinite."""

    def clip_gradients(self, max_norm, norm_type, *, error_if_nonfinite):
        return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=False)


class HasNoEffectOfZeroGrad(ReferenceOptimizer):
    """Leaves gradients as they are when they are to be zeroed."""

    def zero_grad(self, set_to_none=True):
        if set_to_none:
            super().zero_grad(set_to_none)


class DecidesOverflowLocally(ReferenceOptimizer):
    """Skips a step on the rank alone whose own gradients overflowed."""

    found_here = False

    def average(self):
        if self.has_local_gradients:
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            self.found_here = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        super().average()

    def overflow_anywhere(self, overflow):
        return self.found_here
