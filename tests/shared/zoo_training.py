"""The training that each cell of the zoo's matrix runs: in one process, and under a plugin on two ranks.

The optimizer is AdamW with an epsilon above most gradients, so that rounding errors of tiny gradients stay tiny in
the parameters: this tests the plugin, not the conditioning of Adam. Dropout probabilities are 0.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from model_zoo import ZooModel, get_model
from model_zoo.registry import in_double
from torch import Tensor, nn

from booster_core import Booster
from booster_core.plugin import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

WORLD_SIZE = 2
SAMPLES = 4
STEPS = 3
"""Steps before the checkpoint; one more follows it."""


class Plain(NamedTuple):
    """The training in one process.

    Attributes:
        gradients: Gradients by name for each step, also of the one after the checkpoint.
        parameters: The trained parameters by name, when the checkpoint is written and after the last step.
    """

    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


class Reference(NamedTuple):
    """The training in one process, also in fp64, and the state of its checkpoint.

    Attributes:
        plain: The training in the model's dtype.
        exact: The training in fp64; ``None`` if the model can't compute in fp64.
        state: Parameters, extra states and persistent buffers of the checkpoint by name.
        dtype: The dtype of the training.
    """

    plain: Plain
    exact: Plain | None
    state: dict[str, Any]
    dtype: torch.dtype


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of libraries about their own models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_optimizer(zoo: ZooModel, model: nn.Module) -> Optimizer:
    """Return the optimizer over the trained parameters; SGD for models with sparse gradients, which AdamW refuses."""
    parameters = list(trained(model).values())
    if zoo.sparse_gradients:
        return torch.optim.SGD(parameters, lr=1e-2)
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-2, weight_decay=0.0)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_plainly(name: str, home: str) -> None:
    """Train with plain torch; write the `Reference` and a checkpoint into the folder ``home``.

    Collective: none; the only rank of its world.
    """
    zoo = get_model(name)
    with quiet():
        model = zoo.seeded()
        optimizer = make_optimizer(zoo, model)
        gradients = [take_step(zoo, model, optimizer, step) for step in range(STEPS)]
        parameters = [_clones(trained(model))]
        state = _copies(model.state_dict())
        _save(zoo, model, optimizer, home)
        gradients.append(take_step(zoo, model, optimizer, STEPS))
        parameters.append(_clones(trained(model)))
        dtype = torch.float64 if zoo.double else torch.float32
        reference = Reference(Plain(gradients, parameters), _train_exactly(zoo), state, dtype)
    torch.save(reference, f"{home}/reference.pt")


def _save(zoo: ZooModel, model: nn.Module, optimizer: Optimizer, home: str) -> None:
    """Save a boosted copy of a model and its optimizer: what `boost` got can't be trained without it."""
    twin = zoo.seeded()
    its_optimizer = make_optimizer(zoo, twin)
    twin.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    booster = Booster("cpu")
    boosted, wrapped, *_ = booster.boost(twin, its_optimizer)
    booster.save_model(boosted, f"{home}/model", shard=True)
    booster.save_optimizer(wrapped, f"{home}/optimizer", shard=True)


def _train_exactly(zoo: ZooModel) -> Plain | None:
    """Return the training in fp64."""
    if zoo.double:
        return None
    try:
        model = zoo.seeded().double()
        optimizer = make_optimizer(zoo, model)
        gradients = [take_step(zoo, model, optimizer, step, double=True) for step in range(STEPS)]
        parameters = [_clones(trained(model))]
        gradients.append(take_step(zoo, model, optimizer, STEPS, double=True))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a dtype is written into its forward
        return None
    return Plain(gradients, [*parameters, _clones(trained(model))])


def take_step(
    zoo: ZooModel,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    double: bool = False,
    booster: Booster | None = None,
) -> dict[str, Tensor]:
    """Step in one process on the whole batch; return the gradients.

    Args:
        zoo: The model's definition.
        model: The plain or boosted model.
        optimizer: Its optimizer.
        step: Number of the step. Where samples are coupled, its loss is the mean of the losses of the ranks' batches.
        double: Convert the batch to fp64.
        booster: Of a boosted model, for backward.
    """
    batches = (
        [zoo.share(step, rank, SAMPLES) for rank in range(WORLD_SIZE)]
        if zoo.couples_samples
        else [zoo.whole(step, WORLD_SIZE, SAMPLES)]
    )
    for batch in batches:
        loss = zoo.loss_of(model, in_double(batch) if double else batch) / len(batches)
        if booster is None:
            loss.backward()
        else:
            booster.backward(loss, optimizer)
    plain = model.unwrap() if isinstance(model, ModelWrapper) else model
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else _dense(parameter.grad).clone()
        for name, parameter in trained(plain).items()
    }
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def loss_on_ranks(booster: Booster, zoo: ZooModel, model: nn.Module, step: int) -> Tensor:
    """Return the loss of this rank's samples, or of all samples if the ranks form one replica."""
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    if size == WORLD_SIZE:
        return zoo.loss_of(model, zoo.share(step, rank, SAMPLES))
    if zoo.couples_samples:
        losses = (zoo.loss_of(model, zoo.share(step, each, SAMPLES)) for each in range(WORLD_SIZE))
        return sum(losses, torch.zeros(())) / WORLD_SIZE
    return zoo.loss_of(model, zoo.whole(step, WORLD_SIZE, SAMPLES))


def load_reference(home: str) -> Reference:
    """Return what `train_plainly` wrote."""
    reference: Reference = torch.load(Path(home) / "reference.pt", weights_only=False)
    return reference


def _clones(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return copies of tensors and of modules' extra states."""
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state.items()}


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def capture(phase: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns; name the phase in its error."""
    try:
        return call()
    except Exception as error:
        raise CellError(phase, type(error).__name__, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")


class CellError(Exception):
    """An error in a phase of a cell.

    Args:
        phase: What was tried.
        kind: Name of the error's class.
        line: First line of its message.
    """

    def __init__(self, phase: str, kind: str, line: str) -> None:
        super().__init__(phase, kind, line)
        self.phase, self.kind, self.line = phase, kind, line
