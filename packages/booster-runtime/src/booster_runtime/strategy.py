"""`Strategy`: a plugin with what booster-runtime has for every strategy: data, lazy models, adapters, checks.

Its ``configure`` reads top to bottom. A strategy implements `Strategy.shard`; a plugin that needs nothing of this
extends `booster_core.Plugin`.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from booster_core.plugin import SYNCHRONOUS_TRAINING, Capability, Plugin
from booster_runtime.data.shard import compare_splits, shard_dataloader
from booster_runtime.data.watches import watch_first_batch
from booster_runtime.lazy.recording import begin_lazy, check_not_taken, compare_models
from booster_runtime.lora import (
    add_adapters,
    check_adapters,
    check_quantization,
    drop_frozen,
    frozen_parameters,
    watch_frozen,
)
from booster_runtime.model_methods import take_over
from booster_runtime.replicas import compare_parameters
from booster_runtime.sharding.formats import describe_reductions

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from pathlib import Path

    from peft import LoraConfig, PeftModel
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Sampler

    from booster_core.plugin import BoostContext, Boosted, ModelWrapper
    from booster_runtime.lazy.recording import Recording

__all__ = ["OF_LOSS_SCALE", "OF_MODEL", "OF_PRECISION", "STRATEGY_TRAINING", "Strategy", "config_of"]

STRATEGY_TRAINING = SYNCHRONOUS_TRAINING | {Capability.LAZY_INIT, Capability.LORA}
"""What strategies can do that train as one process does, on every device and in every precision."""

_LOSS_SCALE = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "max_scale")
_FP8 = "convert linear layers before `boost`, by `torchao.float8.convert_to_float8_training(model)`"
OF_LOSS_SCALE = {
    name: f"pass `precision=PrecisionPolicy.parse('fp16', loss_scale=LossScaleConfig({name}=...))`"
    for name in _LOSS_SCALE
}
"""What stands for arguments of Colossal-AI's plugins that ours have not, by name: for a loss scale."""
OF_PRECISION = {
    "hysteresis": "leave it out: each overflow lowers the loss scale",
    "norm_type": "pass it to `optimizer.clip_grad_by_norm`",
    "cast_inputs": "leave it out: the precision says in which format forward runs",
    "use_fp8": _FP8,
    "fp8_communication": _FP8,
    "verbose": "leave it out: `booster.describe()` shows the settings",
}
"""The same for formats, and what goes with them."""
OF_MODEL = dict.fromkeys(
    (
        *("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"),
        "enable_sequence_overlap",
    ),
    "leave it out: the model chooses its attention and kernels, as by `attn_implementation=` of transformers",
)
"""The same for what is the model's to choose."""


_Config = TypeVar("_Config")


def config_of(config: type[_Config], given: Mapping[str, Any]) -> _Config:
    """Return a plugin's options, checked.

    Args:
        config: The dataclass of the options.
        given: The values of its fields, and whatever else: what ``locals()`` is at the start of the plugin's signature.
    """
    kind: Any = config
    return cast("_Config", kind(**{field.name: given[field.name] for field in fields(kind)}))


class Strategy(Plugin):
    """A plugin whose loaders resume at any sample, and which takes lazy models and adapters.

    Attributes:
        placeholders: How the values of lazy models, and of models on the host, wait for `shard`: ``None`` gives the
            model its values, whole, on the run's device; ``"device"`` leaves placeholders there, and `shard` gets what
            fills them; ``"own"`` leaves all of it to `shard`.
    """

    placeholders: ClassVar[Literal["device", "own"] | None] = None

    def check_objects(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse lazy models whose values are gone, adapters that would not train, and what `check_model` refuses.

        Ranks compare how their loaders are split, and how their models were built.
        """
        check_not_taken(objects.model)
        check_adapters(objects.model, objects.optimizers, self)
        self.check_model(objects, context)
        assert context.meeting is not None, "`boost` passes its own"
        compare_splits(objects.dataloader, self, context, context.meeting)
        if self.placeholders is not None:
            compare_models(objects.model, context, context.meeting)

    def check_model(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse a model before any value moves; the default refuses none. It must not communicate."""

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Split loaders, prepare the model's values and the optimizers, and let `shard` lay them out.

        Collective: every rank of the world, in step.
        """
        dataloader = shard_dataloader(objects.dataloader, self, context)
        for optimizer in objects.optimizers:
            drop_frozen(objects.model, optimizer)
        frozen = frozen_parameters(objects)
        values = begin_lazy(objects, context, self.placeholders)
        boosted = self.shard(objects._replace(dataloader=dataloader), context, values)
        model: Any = boosted.model
        model.attach(boosted.optimizers, context)
        model.watch_structure()
        watch_frozen(boosted, frozen)
        index, size = self.data_parallel_coordinates(context.coordinator)
        watch_first_batch(model, index=index, size=size)
        take_over(model, context.booster)
        return boosted

    @abstractmethod
    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Return the objects laid out for this rank, wrapped.

        Args:
            objects: As for `Plugin.configure`; the data loader is split already.
            context: As for `Plugin.configure`.
            values: What fills the model's placeholders; ``None`` where the model has its values.

        Collective: every rank of the world, in step.
        """

    def prepare_save(self, model: ModelWrapper, context: BoostContext) -> None:
        """Compare what several ranks hold of parameters; see `compare_parameters`."""
        compare_parameters(model.unwrap(), context.coordinator, self.parts_of(model))

    def parts_of(self, model: ModelWrapper) -> Container[int]:
        """Return the ``id`` of each parameter of a boosted model of which this rank has a part as a plain tensor."""
        del model
        return ()

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        seed: int = 1024,
        drop_last: bool = False,  # noqa: FBT001, FBT002
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        num_workers: int = 0,
        distributed_sampler_cls: type[Sampler[int]] | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a loader that counts epochs by itself and resumes at any sample; see `Plugin.prepare_dataloader`.

        Iterable data sets are split item by item.
        """
        from booster_core.ranks import DistCoordinator
        from booster_runtime.data.prepare import prepare_dataloader

        rank, world_size = self.data_parallel_coordinates(DistCoordinator())
        return prepare_dataloader(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            rank=rank,
            world_size=world_size,
            **kwargs,
        )

    def enable_lora(
        self,
        model: nn.Module,
        *,
        lora_config: LoraConfig | None,
        pretrained_dir: str | Path | None,
        quantization: Any,
        context: BoostContext,
    ) -> PeftModel:
        """Put low-rank adapters into a model, in place, through peft; see `Booster.enable_lora`.

        Collective: every rank of the world, with ``pretrained_dir``.
        """
        # A folder may be there for some ranks only.
        together = contextlib.nullcontext() if pretrained_dir is None else context.coordinator.together("enable_lora")
        with together:
            if quantization is not None:
                quantization = check_quantization(None if quantization is True else quantization, context.device)
            return add_adapters(
                model, self, lora_config=lora_config, pretrained_dir=pretrained_dir, quantization=quantization
            )

    def describe_model(self, model: ModelWrapper) -> Sequence[str]:
        """Say how gradients are summed."""
        return describe_reductions([model.unwrap()])
