"""Mutants of `ReferencePlugin`, its optimizer or model that get parameters, groups, the format or the data wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePlugin, ReferenceStateAdapter
from torch import nn
from typing_extensions import override

from booster_core.plugin import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_core.plugin import BoostContext, Boosted
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator
    from booster_core.state import TensorShard


class StartsApart(ReferencePlugin):
    """Leaves each rank the values that it was given."""

    @override
    def make_equal(self, model: nn.Module) -> None:
        pass


class ChangesWeightsInEvaluation(ModelWrapper):
    """Scales a weight in each evaluation."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            with torch.no_grad():
                next(self.unwrap().parameters()).mul_(1.001)
        return super()._forward(*args, **kwargs)


class UntiesWeights(ReferencePlugin):
    """Gives each of two tied layers a weight of its own."""

    @override
    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        seen: set[int] = set()
        for module in objects.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    setattr(module, name, nn.Parameter(parameter.detach().clone()))
                seen.add(id(parameter))
        return super().configure(objects, context)


class IgnoresGroups(ReferencePlugin):
    """Steps all parameters with the options of the first group."""

    @override
    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        first, *others = objects.optimizer.param_groups if objects.optimizer is not None else [{}]
        for group in others:
            group.update({key: value for key, value in first.items() if key != "params"})
        return super().configure(objects, context)


class OtherBeta2(ReferencePlugin):
    """Steps Adam with a second decay rate that is off by 0.0059."""

    @override
    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        for group in objects.optimizer.param_groups if objects.optimizer is not None else []:
            if "betas" in group:
                group["betas"] = (group["betas"][0], group["betas"][1] - 0.0059)
        return super().configure(objects, context)


class ComputesInFP32(ReferencePlugin):
    """Declares low precision, and computes in fp32."""

    @override
    def precision_of_forward(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        return replace(policy, compute_dtype=torch.float32, loss_scale=None)


class SameSamples(ReferencePlugin):
    """Gives every rank all samples."""

    @override
    def data_parallel_coordinates(self, coordinator: DistCoordinator) -> tuple[int, int]:
        return 0, 1


class OffByOneRounding(ReferenceOptimizer):
    """Lets a weight of one rank drift by one rounding a step."""

    @override
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if dist.get_rank() == 1:  # in one element, by one unit in the last place
            weight = self.param_groups[0]["params"][0].data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        return result


class _OwnersOnly(ReferenceStateAdapter):
    @override
    def model_shards(self) -> Iterator[TensorShard]:
        return (shard for shard in super().model_shards() if shard.is_owner)


class OffByOneRoundingOutsideOfShards(ReferencePlugin):
    """Lists only the shards that a rank owns, as strategies that shard do, so that the drift is in no shard."""

    optimizer_class: ClassVar[type[ReferenceOptimizer]] = OffByOneRounding
    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _OwnersOnly
