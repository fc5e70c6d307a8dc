"""The training that each cell of the zoo's matrix runs: in one process, and under a plugin on two ranks.

The optimizer is AdamW with an epsilon above most gradients, so that rounding errors of tiny gradients stay tiny in
the parameters: this tests the plugin, not the conditioning of Adam. Dropout probabilities are 0.

A tensor may differ from that of one process by the tolerance of its dtype, or by a few times the rounding error of
that process, which is its distance to the same training in fp64.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from model_zoo import ZooModel, get_model
from model_zoo.registry import in_double
from torch import Tensor, nn

from booster_core import Booster
from booster_core.plugin import ModelWrapper
from booster_testing.compare import largest_difference, tolerance_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

WORLD_SIZE = 2
SAMPLES = 4
STEPS = 3
"""Steps before the checkpoint; one more follows it."""
_NO_EFFECT = 1e-6
"""Rounding error of a zero gradient, relative to the model's largest gradient: a few times fp32's 2**-24."""
_ZERO = 1e-9
"""Largest gradient, in fp64 and relative to the model's largest, of a parameter without effect on the loss."""
_ROUNDINGS = 4.0
"""Allowed error relative to that of one process: two ranks round as often, but in another order."""


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


def gradient_findings(ours: dict[str, Tensor], reference: Reference, step: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the gradient that differs most from that of one process, if one does."""
    plain, exact = reference.plain.gradients[step], reference.exact.gradients[step] if reference.exact else None
    return _findings(f"gradient of step {step + 1}", ours, plain, exact, reference, step, zoo)


def parameter_findings(ours: dict[str, Tensor], reference: Reference, last: int, zoo: ZooModel) -> list[str]:
    """Return a sentence for the parameter that differs most: at the checkpoint (``last=0``) or one step later."""
    plain = reference.plain.parameters[last]
    exact = reference.exact.parameters[last] if reference.exact else None
    # A step of this optimizer is at most a tenth of the gradient, so the tolerance of gradients holds for steps, too.
    return _findings(f"after step {STEPS + last}", ours, plain, exact, reference, STEPS - 1 + last, zoo)


def _findings(
    what: str,
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor] | None,
    reference: Reference,
    step: int,
    zoo: ZooModel,
) -> list[str]:
    """Compare each tensor on its own scale, and those without effect on the loss on the model's scale."""
    if ours.keys() != plain.keys():
        return [f"{what}: other names, {', '.join(sorted(ours.keys() ^ plain.keys())[:3])}"]
    largest = max(float(value.abs().max()) for value in reference.plain.gradients[step].values() if value.numel())
    without = _without_effect(reference, step, zoo)
    beyond: dict[str, float] = {}
    for name, expected in plain.items():
        if ours[name].shape != expected.shape:
            return [f"{what}: shape of `{name}` is {tuple(ours[name].shape)}, not {tuple(expected.shape)}"]
        allowed = tolerance_for(reference.dtype).relative
        if exact is not None:
            allowed = max(allowed, _ROUNDINGS * _difference(expected, exact[name]))
        difference = _difference(ours[name], expected)
        if name in without and float((ours[name] - expected).abs().max()) <= _NO_EFFECT * largest:
            continue
        if not difference <= allowed:
            beyond[name] = difference
    if not beyond:
        return []
    worst = max(beyond, key=lambda name: beyond[name])
    return [f"{what}: `{worst}` differs by {beyond[worst]:.1e} of its largest value ({len(beyond)} of {len(plain)} do)"]


def _without_effect(reference: Reference, step: int, zoo: ZooModel) -> set[str]:
    """Return the names of parameters whose gradients are zero except for rounding."""
    names = reference.plain.gradients[step].keys()
    listed = {name for name in names if any(fnmatch(name, pattern) for pattern in zoo.no_effect)}
    exact = reference.plain.gradients[step] if reference.dtype == torch.float64 else None
    if reference.exact is not None:
        exact = reference.exact.gradients[step]
    if exact is None:
        return listed
    largest = {name: float(value.abs().max()) for name, value in exact.items() if value.numel()}
    return listed | {name for name, value in largest.items() if value <= _ZERO * max(largest.values())}


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.is_complex():
        return largest_difference(torch.view_as_real(actual.detach()), torch.view_as_real(expected.detach()))
    return largest_difference(actual.detach(), expected.detach())


def same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a sentence for the first tensor or extra state that differs at all; NaNs are equal."""
    if ours.keys() != theirs.keys():
        return [f"other names: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"]
    for name, expected in theirs.items():
        actual = ours[name]
        if not isinstance(expected, Tensor):
            if actual != expected:
                return [f"`{name}` is {actual!r}, not {expected!r}"]
            continue
        if actual.dtype != expected.dtype or actual.shape != expected.shape:
            return [f"`{name}` is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
        if not torch.equal(_bits(actual), _bits(expected)):
            return [f"`{name}` differs by {_difference(actual, expected):.1e} of its largest value"]
    return []


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's values, with NaNs replaced."""
    return tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor.detach()


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
