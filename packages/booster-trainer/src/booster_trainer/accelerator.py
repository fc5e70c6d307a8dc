"""What the Trainer asks of Accelerate, answered by a `Booster`.

The Trainer reaches everything distributed through its ``accelerator``. Data loaders stay Accelerate's, so that samples
come in the same order as without a Booster; model, optimizer, backward and clipping are the Booster's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, recursively_apply
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from booster_core.errors import ConfigError
from booster_core.plugin import OptimizerWrapper, unwrap_model
from booster_core.state import separate_random_state
from booster_runtime.data import OwnDraws, host_draws, restore_host_draws

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from booster_core import Booster


def share_ranks(booster: Booster, args: Any = None) -> None:
    """Tell Accelerate the ranks of this run, which it reads from torchrun's variables only.

    Without it a run that SLURM or MPI launched counts as many runs of one process.

    Args:
        booster: Of the run.
        args: ``TrainingArguments``, which have asked for ranks and device already.
    """
    coordinator = booster.context.coordinator
    state = PartialState()
    facts = (coordinator.world_size, coordinator.rank, coordinator.local_rank)
    if (state.num_processes, state.process_index, state.local_process_index) == facts:
        return
    state.num_processes, state.process_index, state.local_process_index = facts
    if coordinator.world_size > 1:
        kind = f"MULTI_{booster.device.type.upper()}"
        state.distributed_type = getattr(DistributedType, kind, DistributedType.MULTI_GPU)
        state.backend = torch.distributed.get_backend()
        state.device = booster.device
        if booster.device.type != "cpu":
            torch.accelerator.set_device_index(booster.device)  # one process alone takes the first
        if args is not None and torch.device(args.device).type == booster.device.type:
            args.__dict__["_setup_devices"] = booster.device
    else:
        state.distributed_type = DistributedType.NO


class BoosterAccelerator(Accelerator):  # type: ignore[misc] # accelerate has no types
    """An ``Accelerator`` whose processes are the ranks that see different samples.

    Args:
        booster: Trains the model.
        configured: The accelerator that the Trainer made from its arguments.
    """

    def __init__(self, booster: Booster, configured: Accelerator) -> None:
        # Accelerator.__init__ is not called a second time: it would refuse settings that are made already.
        self.__dict__.update(vars(configured))
        self.scaler = None  # the boosted optimizer scales losses
        self._booster = booster
        self._model: nn.Module | None = None
        self._optimizer: OptimizerWrapper | None = None
        coordinator = booster.context.coordinator
        self.index, self._size = booster.plugin.data_parallel_coordinates(coordinator)
        indices, seeds = zip(*coordinator.all_gather_object((self.index, torch.initial_seed())), strict=True)
        self._seed = seeds[0]
        self._first_ranks = [indices.index(index) for index in range(self._size)]

    @property
    def num_processes(self) -> int:
        """Number of ranks that see different samples."""
        return self._size

    def part_draws(self) -> None:
        """Let ranks that see the same samples draw alike, and others differently.

        Collective: every rank of the world.
        """
        gathered = self._booster.context.coordinator.all_gather_object(host_draws())
        states = [gathered[rank] for rank in self._first_ranks]
        restore_host_draws(states[self.index])
        if any(torch.equal(each[2], states[self.index][2]) for each in states[: self.index]):
            separate_random_state(self.index)

    def adopt(self, model: nn.Module, optimizer: OptimizerWrapper | None) -> None:
        """Train a boosted model from now on."""
        self._model, self._optimizer = model, optimizer

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Return data loaders split between ranks, and boosted objects as they are."""
        del kwargs
        prepared = [self._prepared(each) for each in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, torch.utils.data.DataLoader):
            return self.prepare_data_loader(each)
        if isinstance(each, torch.nn.Module):
            return self.prepare_model(each)
        return each

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return a further model, such as a reference model, boosted without an optimizer.

        Collective: every rank of the world.
        """
        del args, kwargs
        return model if model is self._model else self._booster.boost(model).model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader of this rank's batches, as Accelerate splits them between data parallel ranks.

        Raises:
            ConfigError: If batches are to be dispatched from rank 0, which does not know of ranks that share one.
        """
        del args, kwargs
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        shares_batches = self._size < self._booster.context.coordinator.world_size
        dispatch = self.dispatch_batches
        if shares_batches:
            if dispatch:
                msg = (
                    "`dispatch_batches=True` sends each rank a batch of its own, and ranks of this plugin share "
                    "batches. Leave it out of `accelerator_config`."
                )
                raise ConfigError(msg)
            dispatch = False
        batches: Any = data_loader.batch_sampler
        sampler = getattr(batches, "sampler", None)
        if self._size > 1 and isinstance(sampler, Sampler) and type(sampler) not in (RandomSampler, SequentialSampler):
            batches.sampler = _DrawnAlike(sampler, self._booster)
        with OwnDraws(self._seed):  # of which Accelerate makes the seed of an order
            prepared: DataLoader[Any] = prepare_data_loader(
                data_loader,
                self.device,
                num_processes=self._size,
                process_index=self.index,
                split_batches=self.split_batches,
                put_on_device=self.device_placement,
                rng_types=self.rng_types.copy(),
                dispatch_batches=dispatch,
                even_batches=self.even_batches,
                use_seedable_sampler=self.use_seedable_sampler,
                data_seed=self.dataloader_config.data_seed,
                non_blocking=self.non_blocking,
                use_stateful_dataloader=self.use_stateful_dataloader,
            )
        self._dataloaders.append(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward by the Booster.

        Raises:
            ConfigError: If the optimizer updates parameters within backward, as LOMO does.

        Collective: every data parallel rank.
        """
        if kwargs:
            msg = f"Backward takes no {', '.join(kwargs)} here. Use an optimizer that updates in `step`, such as AdamW."
            raise ConfigError(msg)
        self._booster.backward(loss, self._trained())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients, without communication where the plugin can."""
        return self._booster.no_sync(model, self._trained())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the boosted optimizer; the model has no others to clip.

        Collective: every rank of the world.
        """
        del parameters
        return self._trained().clip_grad_by_norm(float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients of the boosted optimizer."""
        del parameters
        self._trained().clip_grad_by_value(clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed in fp16."""
        return self._optimizer is not None and self._optimizer.found_overflow

    def gather(self, tensor: Any) -> Any:
        """Gather tensors, one from each rank that sees other samples, in the order of these ranks.

        Collective: every rank of the world.
        """
        world_size = self._booster.context.coordinator.world_size
        gathered = super().gather(tensor)
        if self._size == world_size:
            return gathered

        def one_each(whole: Tensor) -> Tensor:
            parts = whole.chunk(world_size)
            return torch.cat([parts[rank] for rank in self._first_ranks])

        return recursively_apply(one_each, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002 - Accelerate's signature
        """Gather values of a batch, each sample once.

        Raises:
            ConfigError: If objects are to be gathered where ranks share batches.

        Collective: every rank of the world.
        """
        if self._size < self._booster.context.coordinator.world_size:
            found: list[Any] = []
            recursively_apply(found.append, input_data)
            if use_gather_object or not found:
                msg = (
                    "Objects are gathered from every rank, and ranks of this plugin share batches, which would count "
                    "several times. Return tensors, and leave `eval_use_gather_object` out."
                )
                raise ConfigError(msg)
        return super().gather_for_metrics(input_data, use_gather_object)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the user's own model."""
        unwrapped: nn.Module = super().unwrap_model(unwrap_model(model), *args, **kwargs)
        return unwrapped

    def get_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: no rank need hold the whole model."""
        del args, kwargs
        msg = "A Booster's model is not gathered on one rank. Call `trainer.save_model(folder)` on every rank."
        raise ConfigError(msg)

    save_state = load_state = save_model = get_state_dict

    def _trained(self) -> OptimizerWrapper:
        if self._optimizer is None:
            msg = "The Trainer has boosted no optimizer yet: its `train` does, or `evaluate` with a `train_dataset`."
            raise ConfigError(msg)
        return self._optimizer


class _DrawnAlike(Sampler[Any]):
    """Draws an order as the first rank would on every rank: of what each draws, a part is taken.

    Args:
        sampler: May draw from global generators, which are each rank's own once the model is boosted.
        booster: Of the run.
    """

    def __init__(self, sampler: Sampler[Any], booster: Booster) -> None:
        self._sampler, self._coordinator = sampler, booster.context.coordinator

    def set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # torch's Sampler does not declare __len__

    def __iter__(self) -> Iterator[Any]:
        states = self._coordinator.broadcast_object(host_draws())
        with nullcontext() if self._coordinator.rank == 0 else OwnDraws(states):
            order = list(self._sampler)
        yield from order
