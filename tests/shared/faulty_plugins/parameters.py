"""Mutants of `ReferencePlugin`, its optimizer or model that get parameters, groups, the format or the data wrong."""

from dataclasses import replace

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePlugin, ReferenceStateAdapter
from torch import nn

from booster_core.plugin import ModelWrapper


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


class IgnoresGroups(ReferencePlugin):
    """Steps all parameters with the options of the first group."""

    def configure(self, objects, context):
        first, *others = objects.optimizer.param_groups if objects.optimizer is not None else [{}]
        for group in others:
            group.update({key: value for key, value in first.items() if key != "params"})
        return super().configure(objects, context)


class IgnoresWeightDecay(ReferencePlugin):
    """Steps without weight decay."""

    def configure(self, objects, context):
        for group in objects.optimizer.param_groups if objects.optimizer is not None else []:
            group["weight_decay"] = 0.0
        return super().configure(objects, context)


class OtherBeta2(ReferencePlugin):
    """Steps Adam with a second decay rate that is off by 0.0059."""

    def configure(self, objects, context):
        for group in objects.optimizer.param_groups if objects.optimizer is not None else []:
            if "betas" in group:
                group["betas"] = (group["betas"][0], group["betas"][1] - 0.0059)
        return super().configure(objects, context)


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
