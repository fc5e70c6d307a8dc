"""Copies of the kit's reference plugins with one fault each: the conformance kit must find every one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from reference_plugins import ReferenceOptimizer, ReferencePipelinePlugin, ReferencePlugin, ReferenceStateAdapter
from torch import nn
from typing_extensions import override

from booster_core.gradients import clip_by_norm
from booster_core.plugin import ModelWrapper, Plugin, unwrap_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_core.plugin import BoostContext, Boosted
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator
    from booster_core.state import ParamGroup, TensorMeta, TensorShard

# ---- gradients, norms and overflows


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


# ---- parameters, groups, formats and data


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


# ---- pipelines


class DropsLastMicrobatch(ReferencePipelinePlugin):
    """Trains without a batch's last samples."""

    def cut(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return all microbatches but one."""
        return super().cut(batch)[:1]


class TakesOneBatchAhead(ReferencePipelinePlugin):
    """Takes a batch that it does not train on."""

    def take(self, data_iter: Iterator[Any]) -> dict[str, Tensor]:
        """Return a batch, and take the one after it."""
        batch = super().take(data_iter)
        next(data_iter, None)
        return batch


class ReversesOutputs(ReferencePipelinePlugin):
    """Returns outputs in the order in which backward ends."""

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs, the last microbatch's first."""
        return super().join(outputs[::-1])


# ---- checkpoints that lack something or mean something else


class ForgetsMasters(ReferenceStateAdapter):
    """Does not save masters."""

    @override
    def master_shards(self) -> Iterator[TensorShard]:
        return iter(())


class IgnoresSavedLearningRate(ReferenceStateAdapter):
    """Keeps the options of its own parameter groups when it loads."""

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[ParamGroup],
    ) -> None:
        super().prepare_optimizer_load(tensors, scalars, self.param_groups())


_SWAPPED = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


class SwapsMoments(ReferenceStateAdapter):
    """Saves and loads each of Adam's moments under the name of the other one."""

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        for shard in super().optimizer_shards():
            yield replace(shard, state=_SWAPPED.get(shard.state or "", shard.state))


class ForgetsBuffers(ReferenceStateAdapter):
    """Neither saves nor loads buffers."""

    @override
    def model_shards(self) -> Iterator[TensorShard]:
        buffers = {name for name, _ in unwrap_model(self.model).named_buffers()}
        return (shard for shard in super().model_shards() if shard.name not in buffers)


class ForgetsExtraState(ReferenceStateAdapter):
    """Neither saves nor loads the extra state of modules."""

    @override
    def extra_state(self) -> Mapping[str, object]:
        return {}

    @override
    def load_extra_state(self, values: Mapping[str, object]) -> None:
        pass


_PARTS = {"optimizer_class": ReferenceOptimizer, "adapter_class": ReferenceStateAdapter, "model_class": ModelWrapper}


def _plugin_with(part: type) -> type:
    """Return `ReferencePlugin` with a faulty part, of the same name."""
    (place,) = (place for place, kind in _PARTS.items() if issubclass(part, kind))
    return type(part.__name__, (ReferencePlugin,), {"__module__": __name__, "__doc__": part.__doc__, place: part})


FAULTY: dict[str, type] = {
    name: each if issubclass(each, Plugin) else _plugin_with(each)
    for name, each in list(globals().items())
    if isinstance(each, type) and each.__module__ == __name__ and not name.startswith("_")
}
"""The plugins, by name."""
globals().update(FAULTY)  # ranks unpickle them
