"""Mutants of the state adapter of `ReferencePlugin`: checkpoints lack something or mean something else."""

from dataclasses import replace

from reference_plugins import ReferenceStateAdapter

from booster_core.plugin import unwrap_model
from booster_core.state import NamedTensors


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


class ForgetsParameter(ReferenceStateAdapter):
    """Neither saves nor loads the model's first parameter."""

    def model_shards(self):
        first = next(iter(NamedTensors.of(unwrap_model(self.model)).tensors))
        return (shard for shard in super().model_shards() if shard.name != first)
