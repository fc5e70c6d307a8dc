"""Copies of the kit's reference plugins with one fault each: the conformance kit must find every one."""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePipelinePlugin, ReferencePlugin, ReferenceStateAdapter
from torch import nn

from booster_core.gradients import clip_by_norm
from booster_core.plugin import ModelWrapper, Plugin, unwrap_model

# ---- gradients, norms or overflows that are wrong


class SumsGradients(ReferenceOptimizer):
    """Sums gradients over ranks in place of averaging them."""

    def reduce(self, gradient):
        dist.all_reduce(gradient)


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


# ---- parameters, groups, the format or the data


class StartsApart(ReferencePlugin):
    """Leaves each rank the values that it was given."""

    def make_equal(self, model):
        pass


class ChangesWeightsInEvaluation(ModelWrapper):
    """Scales a weight in each evaluation."""

    def _forward(self, *args, **kwargs):
        if not self.training:
            with torch.no_grad():
                next(self.unwrap().parameters()).mul_(1.001)
        return super()._forward(*args, **kwargs)


class UntiesWeights(ReferencePlugin):
    """Gives each of two tied layers a weight of its own."""

    def configure(self, objects, context):
        seen = set()
        for module in objects.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    setattr(module, name, nn.Parameter(parameter.detach().clone()))
                seen.add(id(parameter))
        return super().configure(objects, context)


class _ChangesGroups(ReferencePlugin):
    def configure(self, objects, context):
        groups = [] if objects.optimizer is None else objects.optimizer.param_groups
        for group in groups:
            group.update(self.changes(group, groups[0]))
        return super().configure(objects, context)


class IgnoresGroups(_ChangesGroups):
    """Steps all parameters with the options of the first group."""

    def changes(self, group, first):
        return {key: value for key, value in first.items() if key != "params"}


class OtherBeta2(_ChangesGroups):
    """Steps Adam with a second decay rate that is off by 0.0059."""

    def changes(self, group, first):
        return {"betas": (group["betas"][0], group["betas"][1] - 0.0059)} if "betas" in group else {}


class ComputesInFP32(ReferencePlugin):
    """Declares low precision, and computes in fp32."""

    def precision_of_forward(self, policy):
        return replace(policy, compute_dtype=torch.float32, loss_scale=None)


class SameSamples(ReferencePlugin):
    """Gives every rank all samples."""

    def data_parallel_coordinates(self, coordinator):
        return 0, 1


class OffByOneRounding(ReferenceOptimizer):
    """Lets a weight of one rank drift by one rounding a step."""

    def step(self, closure=None):
        result = super().step(closure)
        if dist.get_rank() == 1:  # in one element, by one unit in the last place
            weight = self.param_groups[0]["params"][0].data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        return result


class _OwnersOnly(ReferenceStateAdapter):
    def model_shards(self):
        return (shard for shard in super().model_shards() if shard.is_owner)


class OffByOneRoundingOutsideOfShards(ReferencePlugin):
    """Lists only the shards that a rank owns, as strategies that shard do, so that the drift is in no shard."""

    optimizer_class = OffByOneRounding
    adapter_class = _OwnersOnly


# ---- pipelines


class DropsLastMicrobatch(ReferencePipelinePlugin):
    """Trains without a batch's last samples."""

    def cut(self, batch):
        """Return all microbatches but one."""
        return super().cut(batch)[:1]


class TakesOneBatchAhead(ReferencePipelinePlugin):
    """Takes a batch that it does not train on."""

    def take(self, data_iter):
        """Return a batch, and take the one after it."""
        batch = super().take(data_iter)
        next(data_iter, None)
        return batch


class ReversesOutputs(ReferencePipelinePlugin):
    """Returns outputs in the order in which backward ends."""

    def join(self, outputs):
        """Return the outputs, the last microbatch's first."""
        return super().join(outputs[::-1])


# ---- the state adapter: checkpoints lack something or mean something else


class ForgetsMasters(ReferenceStateAdapter):
    """Does not save masters."""

    def master_shards(self):
        return iter(())


class IgnoresSavedLearningRate(ReferenceStateAdapter):
    """Keeps the options of its own parameter groups when it loads."""

    def prepare_optimizer_load(self, tensors, scalars, groups):
        super().prepare_optimizer_load(tensors, scalars, self.param_groups())


_SWAPPED = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


class SwapsMoments(ReferenceStateAdapter):
    """Saves and loads each of Adam's moments under the name of the other one."""

    def optimizer_shards(self):
        for shard in super().optimizer_shards():
            yield replace(shard, state=_SWAPPED.get(shard.state or "", shard.state))


class ForgetsBuffers(ReferenceStateAdapter):
    """Neither saves nor loads buffers."""

    def model_shards(self):
        buffers = {name for name, _ in unwrap_model(self.model).named_buffers()}
        return (shard for shard in super().model_shards() if shard.name not in buffers)


class ForgetsExtraState(ReferenceStateAdapter):
    """Neither saves nor loads the extra state of modules."""

    def extra_state(self):
        return {}

    def load_extra_state(self, values):
        pass


_PARTS = {"optimizer_class": ReferenceOptimizer, "adapter_class": ReferenceStateAdapter, "model_class": ModelWrapper}


def _plugin_with(part):
    """Return `ReferencePlugin` with a faulty part, of the same name."""
    (place,) = (place for place, kind in _PARTS.items() if issubclass(part, kind))
    return type(part.__name__, (ReferencePlugin,), {"__module__": __name__, "__doc__": part.__doc__, place: part})


FAULTY = {
    name: each if issubclass(each, Plugin) else _plugin_with(each)
    for name, each in list(globals().items())
    if isinstance(each, type) and each.__module__ == __name__ and not name.startswith("_")
}
"""The plugins, by name."""
globals().update(FAULTY)  # ranks unpickle them
