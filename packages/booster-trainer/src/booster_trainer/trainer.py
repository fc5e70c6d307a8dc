"""`BoosterTrainer` and `with_booster`: a Trainer whose model a `Booster` trains.

The Trainer's loop, samples, schedulers, callbacks and logs stay as they are. Overridden is what would wrap the model,
and what reads or writes model and optimizer as if every rank held them whole.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import has_length

from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import ModelWrapper, PipelinePlugin, unwrap_model
from booster_core.state import is_adapted
from booster_trainer.accelerator import BoosterAccelerator, share_ranks
from booster_trainer.arguments import (
    check_accelerator,
    check_arguments,
    check_forward,
    check_model,
)
from booster_trainer.losses import WeightedLosses

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from booster_core import Booster

_TrainerT = TypeVar("_TrainerT", bound=Trainer)
_OPTIMIZER = "optimizer"
_SCALER = "loss_scaler.pt"
_BATCHES = "batches_in_pass.json"


class _Boosting(WeightedLosses):
    """The overrides; comes before a Trainer in the order of classes."""

    lr_scheduler: Any
    model_wrapped: Any
    optimizer: Any
    _has_saved = False
    _pass: tuple[Any, int] = (None, 0)  # the pass over the data that goes on, and how many of its batches are used
    _num_in_pass: int | None = None  # batches in a pass, once a stream came to its end

    def __init__(self, *args: Any, booster: Booster, **kwargs: Any) -> None:
        self.booster = booster
        share_ranks(booster)  # trainers ask for ranks before Trainer.__init__
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the Booster answer what the Trainer asks of Accelerate."""
        check_model(self.model)
        share_ranks(self.booster, self.args)  # which forget them when they are made
        check_arguments(self.args, self.booster, self.model)
        self.args._n_gpu = 1  # noqa: SLF001 - as Trainer.__init__ does where it uses no DataParallel
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        self.accelerator = BoosterAccelerator(self.booster, self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Boosted models compute in the Booster's precision: no autocast and no loss scaling on top.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: `boost` places it, and no rank need have room for the whole."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None) -> Any:  # noqa: FBT001, FBT002, ARG002 - the Trainer's signature
        """Return the boosted model, and boost it with the optimizer at the first call.

        Evaluation before training boosts the optimizer too, because a model is boosted once.

        Collective: every rank of the world.
        """
        if isinstance(self.model_wrapped, ModelWrapper) and self.model_wrapped.unwrap() is self.model:
            return self.model_wrapped
        shares_batches = self.accelerator.num_processes < self.args.world_size
        check_forward(self.model, self.booster.plugin.name, is_split=shares_batches)
        self._num_parameters = _num_parameters(self.model)
        will_train = training or self.train_dataset is not None
        optimizer = self.create_optimizer() if will_train else None
        boosted = self.booster.boost(self.model, optimizer)
        plugin = self.booster.plugin
        if isinstance(plugin, PipelinePlugin) and plugin.has_pipeline(boosted.model):
            msg = (
                f"The Trainer calls the model, and plugin '{plugin.name}' runs this one through a pipeline. Use "
                "`pp_size=1`, or a loop with `booster_runtime.train_batch`."
            )
            raise ConfigError(msg)
        self.model_wrapped = boosted.model
        if optimizer is not None:
            self.optimizer = boosted.optimizer
        self.accelerator.adopt(boosted.model, boosted.optimizer)
        return boosted.model

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:  # noqa: ARG002 - the Trainer's signature
        return False  # the boosted optimizer computes norms

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any) -> Any:
        """Return how long the training is; a stream whose end was seen before this run resumed has a length."""
        values = list(super().set_initial_training_values(args, dataloader, *others))
        self._has_length = has_length(dataloader)
        if self._num_in_pass is not None and not self._has_length:
            values[1] = max(self._num_in_pass // args.gradient_accumulation_steps, 1)
        return tuple(values)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Return the batches of a step, counting those of a pass over a stream, which knows its length at its end."""
        found = super().get_batch_samples(epoch_iterator, num_batches, *args)
        known, number = self._pass
        if known is None and self._num_in_pass is None:  # a run that resumes has skipped what its steps have used
            number = self.state.global_step * self.args.gradient_accumulation_steps
        self._pass = (epoch_iterator, len(found[0]) + (number if known in (None, epoch_iterator) else 0))
        if len(found[0]) < num_batches and not self._has_length and self._num_in_pass is None:
            self._num_in_pass = self._pass[1]
        return found

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a step, over all ranks that see different ones."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's share of the operations on a batch; ranks hold parts of the model that they share."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs or self._num_parameters is None:
            return 0
        share = self.accelerator.num_processes / self.args.world_size
        return int(6 * inputs[name].numel() * self._num_parameters * share)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - the Trainer's signature
        """Write the model from every rank; transformers before 5.23 calls `_save` on the first one alone.

        Collective: every rank of the world.
        """
        self._has_saved = False
        super().save_model(output_dir, _internal_call=_internal_call)
        if not self._has_saved:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model as `Booster.save_model` does, from every rank, and the rest as the Trainer does.

        Collective: every rank of the world.
        """
        self._has_saved = True
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        boosted = self._wrap_model(self.model, training=False)
        if state_dict is not None:
            msg = "The values are taken from the boosted model: leave `state_dict` out."
            raise ConfigError(msg)
        if callable(getattr(self.model, "save_pretrained", None)):
            boosted.save_pretrained(folder)
        else:
            self.booster.save_model(boosted, folder / "model.safetensors")
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer as `Booster.save_optimizer` does, and scheduler and loss scale as the Trainer does.

        Collective: every rank of the world.
        """
        self.booster.save_optimizer(self.optimizer, Path(output_dir) / _OPTIMIZER, shard=True)
        if self.args.should_save:
            (Path(output_dir) / _BATCHES).write_text(json.dumps(self._num_in_pass))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
            scaler = self.optimizer.loss_scaler
            if scaler is not None:
                torch.save(scaler.state_dict(), Path(output_dir) / _SCALER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read the model under this plugin and number of ranks, whichever wrote it.

        Raises:
            CheckpointError: If tensors are missing, damaged or of another model, on every rank.
            ConfigError: If adapters are read into a model that is boosted already.

        Collective: every rank of the world.
        """
        with self.booster.context.coordinator.together("read the position"):
            written = Path(resume_from_checkpoint) / _BATCHES
            self._num_in_pass = json.loads(written.read_text()) if written.exists() else None
            self._pass = (None, 0)
        if not is_adapted(unwrap_model(self.model)):
            self.booster.load_model(self._wrap_model(self.model), resume_from_checkpoint)
            return
        if isinstance(self.model_wrapped, ModelWrapper):
            msg = "Adapters are read before the model is boosted: resume by the first call, before `evaluate`."
            raise ConfigError(msg)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Read random states: alike on ranks that share batches, different on others, whatever ranks saved them.

        Collective: every rank of the world.
        """
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.accelerator.part_draws()

    def _load_best_model(self) -> None:
        """Read the best checkpoint into the boosted model; the arguments of one with adapters ask for none.

        Collective: every rank of the world.
        """
        self.booster.load_model(self.model_wrapped, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read optimizer, scheduler and loss scale.

        Raises:
            CheckpointError: If the checkpoint has no optimizer that a Booster wrote.

        Collective: every rank of the world.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        has_optimizer = self.booster.context.coordinator.broadcast_object((folder / _OPTIMIZER).is_dir())
        if not has_optimizer:
            msg = (
                f"'{checkpoint}' has no optimizer that a Booster wrote. To begin with its model alone, load that by "
                "`from_pretrained`, and train without `resume_from_checkpoint`."
            )
            raise CheckpointError(msg)
        self.booster.load_optimizer(self.optimizer, folder / _OPTIMIZER)
        with self.booster.context.coordinator.together("load the scheduler"):
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
            scaler = self.optimizer.loss_scaler
            if scaler is not None and (folder / _SCALER).exists():
                scaler.load_state_dict(torch.load(folder / _SCALER, weights_only=True))


def _num_parameters(model: nn.Module) -> int | None:
    count = getattr(model, "num_parameters", None)
    return int(count(exclude_embeddings=True)) if callable(count) else None


def with_booster(trainer_class: type[_TrainerT]) -> type[_TrainerT]:
    """Return a Trainer class whose objects take a ``booster``, which trains their model.

    Example::

        trainer = with_booster(SFTTrainer)(booster=Booster(plugin="zero"), model=model, args=args, ...)

    Args:
        trainer_class: ``transformers.Trainer`` or a class derived from it.

    Raises:
        TypeError: If it is another class.

    Collective: none; making the object is, on every rank, as are its ``train``, ``evaluate`` and ``save_model``.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        msg = f"`with_booster` takes a class derived from `transformers.Trainer`; got `{trainer_class!r}`."
        raise TypeError(msg)
    made = types.new_class(f"Booster{trainer_class.__name__}", (_Boosting, trainer_class))
    made.__doc__ = f"``{trainer_class.__name__}`` whose model the ``booster`` that it is given trains."
    return made


class BoosterTrainer(_Boosting, Trainer):
    """``transformers.Trainer`` whose model a Booster trains, under any plugin without a pipeline.

    Loops, samples, losses, schedulers, callbacks and logs are the Trainer's, as with the same global batch in one
    process. ``save_model`` and checkpoints are written from all ranks, and read under any plugin and number of ranks.

    Args:
        *args: As for ``Trainer``.
        booster: Trains the model; made after the launch.
        **kwargs: As for ``Trainer``.

    Raises:
        ConfigError: If ``TrainingArguments`` contradict the Booster, such as by ``fsdp``, ``deepspeed`` or another
            precision, or the plugin runs the model through a pipeline (at the first ``train`` or ``evaluate``).

    Collective: every rank of the world, as are ``train``, ``evaluate``, ``predict`` and ``save_model``.
    """
