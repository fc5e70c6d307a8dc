"""Save, load and continue a training on each rank, for the conformance kit's checkpoint tests.

A checkpoint of `SingleDevicePlugin` is the common form: what it loads from a plugin's checkpoint, and what a plugin
loads from one of its own, must be the same state, and the next step the same. As it has one process, every rank trains
on the same batches here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.plugin import SingleDevicePlugin, unwrap_model
from booster_core.state import NamedTensors
from booster_testing.training import BoostedRun, assembled, tensors_of, whole_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_testing.training import Training

_MASTER = "/master"
_SAVED_STEP = 2


@dataclass
class Snapshot:
    """The state of a training.

    Attributes:
        values: The true value of each parameter by name: its master where the run keeps one.
        buffers: The model's persistent buffers, as this rank's model holds them.
        extra_state: The model's extra state by name, as this rank's model holds it.
        optimizer: Tensors of the optimizer's state, by ``name/state``, without masters.
        groups: Names of parameters and options of each parameter group.
        loss_scale: State of the loss scale, under fp16.
        schedule: State of the learning rate scheduler.
    """

    values: dict[str, Tensor]
    buffers: dict[str, Tensor]
    extra_state: dict[str, Any]
    optimizer: dict[str, Tensor]
    groups: list[tuple[list[str], dict[str, Any]]]
    loss_scale: Mapping[str, float] | None
    schedule: dict[str, Any]


@dataclass
class Continued:
    """A state, and what a run makes of it.

    Attributes:
        snapshot: The state.
        parameters: Parameters and buffers after two more steps, with dropout.
        losses: Losses of these two steps.
        next_parameters: Parameters and buffers after one step from the state, without dropout.
    """

    snapshot: Snapshot
    parameters: dict[str, Tensor]
    losses: list[float]
    next_parameters: dict[str, Tensor]


class CheckpointRun(BoostedRun):
    """A run with a learning rate scheduler.

    Args:
        training: The settings.
        starts_elsewhere: Start with other values and other options than the run that was saved.

    Collective: every rank of the world.
    """

    def __init__(self, training: Training, *, starts_elsewhere: bool = False) -> None:
        self.starts_elsewhere = starts_elsewhere
        super().__init__(replace(training, same_batches=True))

    def _start(self) -> None:
        self.booster = self.training.make_booster()
        self.device = self.booster.device
        original = self.training.make_model()
        optimizer = self.training.make_optimizer(original)
        if self.starts_elsewhere:
            with torch.no_grad():
                for tensor in (*original.parameters(), *original.buffers()):
                    tensor.add_(1)
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = group["lr"] * 7, 0.5
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        boosted = self.booster.boost(original, optimizer, lr_scheduler=scheduler)
        self.model, self.optimizer, self.scheduler = boosted.model, boosted.optimizer, boosted.lr_scheduler

    def objects(self) -> dict[str, Any]:
        """Return the arguments of `Booster.save_checkpoint` and `Booster.load_checkpoint`."""
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def advance(self, step: int) -> float:
        """Take a step and return its loss."""
        loss = self.loss(step)
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def load(self, root: str) -> None:
        """Load the saved step."""
        loaded = self.booster.load_checkpoint(root, **self.objects())
        assert loaded.step == _SAVED_STEP
        assert loaded.extra == {"note": "saved"}

    def snapshot(self) -> Snapshot:
        """Return the present state."""
        adapter = self.booster.state_adapter(self.model, self.optimizer)
        optimizer = assembled(adapter.optimizer_shards())
        module = unwrap_model(self.model)
        names = {name for name, _ in module.named_parameters()}
        whole = {name: tensor for name, tensor in whole_model(self.booster, self.model).items() if name in names}
        masters = {key.removesuffix(_MASTER): value for key, value in optimizer.items() if key.endswith(_MASTER)}
        first_names = {name: adapter.tied_names().get(name, name) for name in whole}
        persistent = self.model.state_dict()  # some plugins gather for it, and refuse the user's own model
        scaler = self.optimizer.loss_scaler
        return Snapshot(
            values={name: masters.get(first_names[name], tensor) for name, tensor in whole.items()},
            buffers=tensors_of({name: tensor for name, tensor in module.named_buffers() if name in persistent}),
            extra_state={name: value for name, value in persistent.items() if name.endswith("_extra_state")},
            optimizer={key: value for key, value in optimizer.items() if not key.endswith(_MASTER)},
            groups=[(list(group.params), dict(group.options)) for group in adapter.param_groups()],
            loss_scale=None if scaler is None else scaler.state_dict(),
            schedule=self.scheduler.state_dict(),
        )

    def without_dropout(self) -> dict[str, Tensor]:
        """Take a step without dropout and return parameters and buffers after it."""
        for module in unwrap_model(self.model).modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.advance(_SAVED_STEP)
        return whole_model(self.booster, self.model)


def save(training: Training, root: str) -> CheckpointRun:
    """Train two steps and save.

    Collective: every rank of the world.
    """
    run = CheckpointRun(training)
    for step in range(_SAVED_STEP):
        run.advance(step)
    run.booster.save_checkpoint(root, step=_SAVED_STEP, extra={"note": "saved"}, **run.objects())
    return run


def save_and_continue(training: Training, root: str) -> Continued:
    """Train two steps, save, and continue.

    Collective: every rank of the world.
    """
    return _continue(save(training, root), root)


def differing_from_file(training: Training, folder: str) -> list[str]:
    """Train two steps, each rank on samples of its own, save, and return parameters of which this rank has others.

    Collective: every rank of the world.
    """
    run = BoostedRun(training)
    for step in range(_SAVED_STEP):
        run.optimizer.backward(run.loss(step))
        run.optimizer.step()
        run.optimizer.zero_grad()
    path = f"{folder}/model.safetensors"
    run.booster.save_model(run.model, path)
    buffers = NamedTensors.of(unwrap_model(run.model)).buffers
    differ = []
    with checkpoint_io_class().open_model(path) as files:
        for shard in run.booster.state_adapter(run.model).model_shards():
            values = shard.data.detach().cpu()
            written = replace(shard, data=torch.empty_like(values, memory_format=torch.contiguous_format))
            if shard.name not in buffers:
                files.read(shard.name, written)
                differ += [] if torch.equal(written.data, values) else [shard.name]
    return differ


def load_and_continue(training: Training, root: str) -> Continued:
    """Load into a new run with other values, and continue.

    Collective: every rank of the world.
    """
    run = CheckpointRun(training, starts_elsewhere=True)
    run.load(root)
    return _continue(run, root)


def _continue(run: CheckpointRun, root: str) -> Continued:
    snapshot = run.snapshot()
    losses = [run.advance(step) for step in (_SAVED_STEP, _SAVED_STEP + 1)]
    parameters = whole_model(run.booster, run.model)
    run.load(root)
    return Continued(snapshot, parameters, losses, run.without_dropout())


def on_one_device(training: Training) -> Training:
    """Return the same training under `SingleDevicePlugin`."""
    return replace(training, plugin_class=SingleDevicePlugin, options={})
