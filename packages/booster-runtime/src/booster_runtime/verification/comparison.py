"""`verify`: the same training under a plugin and in one process, compared tensor by tensor."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import PipelinePlugin
from booster_runtime.data.batches import call_with
from booster_runtime.lazy import is_lazy, materialize
from booster_runtime.state.regions import slices_of
from booster_runtime.verification.reference import (
    Reference,
    floating_leaves,
    loss_of_outputs,
    share_of,
    train_reference,
    without_dropout,
)
from booster_runtime.verification.report import Difference, Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer

    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy

_SEED = 20
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative error of outputs, losses and gradients, by the format of compute.

Sums of some thousand terms in another order differ by about 100 roundings: 2**-24 each in fp32, of which this is twenty
times as much; low precision rounds at each layer.
"""
_OF_UPDATES = 10.0
"""How much larger the tolerance of a parameter's update is: optimizers that divide by second moments turn rounding
errors of small gradients into updates of full size."""
_SMALL = 1e-3
"""Tensors that are smaller than this part of the typical one are measured against this part: they may be made of
rounding errors."""


def verify(
    build: Callable[[], tuple[Any, ...]],
    plugin: Plugin | str,
    batch: Any,
    steps: int = 2,
    *,
    mixed_precision: PrecisionPolicy | str | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Train under a plugin and in one process, and compare outputs, losses, gradients and updates by name.

    Each rank trains the whole model on the whole batch as the reference, so model, optimizer and batch must fit into
    one device's memory. Every dropout is off; evaluation comes before training. The random state is restored
    afterwards.

    Args:
        build: Returns ``(model, optimizer)`` or ``(model, optimizer, criterion)``, with the same weights each time it
            is called under the same seed. The criterion is called as ``criterion(outputs, batch)`` and returns a mean
            over samples; without one the model's own ``outputs.loss`` is taken.
        plugin: The plugin, or the name of an installed one.
        batch: The whole batch, the same on every rank, which data parallel ranks share evenly: a mapping becomes
            keyword arguments of the model, a list or tuple positional ones.
        steps: Number of training steps, all on this batch.
        mixed_precision: As for `Booster`.
        tolerance: Largest relative error of outputs, losses and gradients that counts as rounding; by the precision
            when ``None``. Updates of parameters may differ by ten times as much.

    Returns:
        Every comparison; ``verify(...).check()`` raises where one is beyond rounding.

    Raises:
        ConfigError: If ``build`` makes other weights each time, or the batch can't be shared evenly.

    Collective: every rank of the world.
    """
    started = time.perf_counter()
    booster = Booster(mixed_precision=mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator
    with _random_state_kept():
        index, size = booster.plugin.data_parallel_coordinates(coordinator)
        error: Exception | None = None
        try:
            shares = [share_of(batch, one, size) for one in range(size)]
            model, optimizer, criterion = _built(build)
            reference_model, reference_optimizer, _ = _built(build)
            if is_lazy(reference_model):
                materialize(reference_model)
            else:
                _check_same(model, reference_model)
        except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
            error = caught
        coordinator.raise_together(error, name="verify")
        compute = booster.precision.compute_dtype
        limit = _TOLERANCES[compute] if tolerance is None else tolerance
        with without_dropout(model, reference_model):
            reference = train_reference(
                reference_model.to(booster.device),
                reference_optimizer,
                criterion,
                shares,
                steps,
                lambda: _autocast(booster),
            )
            del reference_model, reference_optimizer
            run = _Run(booster, model, optimizer, criterion, shares[index], index, reference, limit)
            found = run.compare(steps)
    return Verification(
        plugin=booster.plugin.name,
        world_size=coordinator.world_size,
        differences=_merged(coordinator.all_gather_object(found)),
        seconds=time.perf_counter() - started,
    )


class _Run:
    """The boosted side of a verification.

    Args:
        booster: With the plugin under test.
        model: The user's model.
        optimizer: Over its parameters.
        criterion: Called as ``criterion(outputs, share)``.
        share: This rank's share of the batch.
        index: Whose share that is.
        reference: What one process did.
        limit: The tolerance of outputs, losses and gradients.
    """

    def __init__(
        self,
        booster: Booster,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[[Any, Any], Tensor],
        share: Any,
        index: int,
        reference: Reference,
        limit: float,
    ) -> None:
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        boosted = booster.boost(model, optimizer, criterion)
        self.booster = booster
        self.model: nn.Module = boosted.model
        self.optimizer: Any = boosted.optimizer
        self.criterion = criterion
        self.share = share
        self.index = index
        self.reference = reference
        self.limit = limit
        self.found: list[Difference] = []

    def compare(self, steps: int) -> list[Difference]:
        """Evaluate and train, and return every comparison of this rank.

        Collective: every rank of the world.
        """
        initial = self.reference.initial
        self._parameters("initial parameter", 0, initial, self._sizes(initial), 0.0)
        self._evaluate()
        self.model.train()
        for step in range(1, steps + 1):
            self._step(step)
        updates = {name: self.reference.final[name] - values for name, values in initial.items()}
        sizes = self._sizes(updates)
        # An update that a gradient of rounding errors made says nothing: Adam gives it full size and any sign.
        measured = {name: self.reference.final[name] for name in initial if self._has_signal(name)}
        self._parameters("update", steps, measured, sizes, _OF_UPDATES * self.limit)
        return self.found

    def _has_signal(self, name: str) -> bool:
        """Return whether a parameter's gradient was more than rounding errors of larger ones, in any step."""
        for gradients in self.reference.gradients:
            gradient = gradients.get(name)
            if gradient is not None and _typical_rms([gradient]) > self.limit * _typical_rms(gradients.values()):
                return True
        return not any(name in gradients for gradients in self.reference.gradients)

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            loss, outputs = self._forward(backward=False)
        expected = self.reference.outputs[self.index]
        if outputs is not None:
            for path, values in floating_leaves(outputs).items():
                if path in expected and values.shape == expected[path].shape:
                    self._add("output", 0, path, _error(values, expected[path]), self.limit)
        self._loss("evaluation loss", 0, loss, self.reference.evaluation_losses[self.index])

    def _step(self, step: int) -> None:
        loss, _ = self._forward(backward=True)
        self._loss("loss", step, loss, self.reference.losses[step - 1][self.index])
        expected = self.reference.gradients[step - 1]
        sizes = self._sizes(expected)
        for name in self.trained:
            gradient = self.booster.full_gradient(self.model, name)
            wanted = expected.get(name)
            if gradient is None and wanted is None:
                continue
            zero = torch.zeros_like(self.reference.initial[name])
            found = zero if gradient is None else gradient.cpu()
            error = _error(found, zero if wanted is None else wanted.cpu(), sizes.get(name, _typical(sizes)))
            self._add("gradient", step, name, error, self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self, *, backward: bool) -> tuple[Tensor | None, Any]:
        """Return this rank's loss and outputs; ``None`` where another stage of a pipeline has them."""
        plugin = self.booster.plugin
        if isinstance(plugin, PipelinePlugin) and _has_stages(plugin):
            result = self.booster.execute_pipeline(
                iter([self.share]),
                self.model,
                self.criterion,
                self.optimizer if backward else None,
                return_outputs=not backward,
            )
            return result["loss"], result.get("outputs")
        outputs = call_with(self.model, self.share)
        loss = self.criterion(outputs, self.share)
        if backward:
            self.booster.backward(loss, self.optimizer)
        return loss.detach(), outputs

    def _loss(self, what: str, step: int, loss: Tensor | None, expected: float) -> None:
        if loss is not None:
            size = max(abs(expected), 1e-6)
            self._add(what, step, "", abs(float(loss) - expected) / size, self.limit)

    def _parameters(
        self, what: str, step: int, expected: Mapping[str, Tensor], sizes: Mapping[str, float], limit: float
    ) -> None:
        """Compare the parts of parameters that are here."""
        parts: dict[str, list[float]] = {}
        rounding: dict[str, float] = {}
        for shard in self.booster.state_adapter(self.model).model_shards():
            whole = expected.get(shard.name)
            if whole is None or not shard.numel:
                continue
            start, stop = shard.flat_range
            wanted = whole[slices_of(shard.box)].reshape(-1)[start:stop]
            error = float((shard.data.detach().cpu().double().reshape(-1) - wanted.double()).norm())
            parts.setdefault(shard.name, []).append(error)
            rounding[shard.name] = max(torch.finfo(dtype).eps for dtype in (whole.dtype, shard.dtype))
        for name, errors in parts.items():
            self._add(what, step, name, math.hypot(*errors) / sizes[name], limit + rounding[name])

    def _sizes(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return what errors of each tensor are measured against: its norm, or a small part of what is typical."""
        typical = _typical_rms(tensors.values())
        return {
            name: max(float(values.double().norm()), _SMALL * typical * math.sqrt(values.numel()), 1e-30)
            for name, values in tensors.items()
        }

    def _add(self, what: str, step: int, name: str, error: float, tolerance: float) -> None:
        finite = error if math.isfinite(error) else math.inf
        self.found.append(Difference(what=what, step=step, name=name, error=finite, tolerance=tolerance))


def _built(build: Callable[[], tuple[Any, ...]]) -> tuple[nn.Module, Optimizer, Callable[[Any, Any], Tensor]]:
    torch.manual_seed(_SEED)
    made = build()
    kinds = (nn.Module, torch.optim.Optimizer)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(map(isinstance, made, kinds)):
        got = ", ".join(type(each).__name__ for each in made) if isinstance(made, tuple) else type(made).__name__
        msg = f"`build` returns (model, optimizer) or (model, optimizer, criterion); got `{got}`."
        raise ConfigError(msg)
    return made[0], made[1], made[2] if len(made) == 3 and made[2] is not None else loss_of_outputs


def _check_same(model: nn.Module, other: nn.Module) -> None:
    others = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in others or not torch.equal(parameter, others[name]):
            msg = (
                f"`build` makes other weights each time: '{name}' differs between two calls under the same seed. Draw "
                "them from torch's generator, or load them from a file."
            )
            raise ConfigError(msg)


def _has_stages(plugin: PipelinePlugin) -> bool:
    """Return whether a plugin that may have a pipeline was configured with one."""
    config = getattr(plugin, "config", None)
    return getattr(getattr(config, "pipeline", None), "size", 2) > 1


def _autocast(booster: Booster) -> contextlib.AbstractContextManager[Any]:
    compute = booster.precision.compute_dtype
    if compute in (None, torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(booster.device.type, dtype=compute)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    import random

    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what scripts draw from
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _error(found: Tensor, expected: Tensor, size: float | None = None) -> float:
    if found.shape != expected.shape:
        return math.inf
    size = max(float(expected.double().norm()), 1e-30) if size is None else size
    return float((found.double() - expected.double()).norm()) / size


def _typical_rms(tensors: Any) -> float:
    """Return the root mean square of all elements."""
    squares, count = 0.0, 0
    for values in tensors:
        squares += float(values.double().norm()) ** 2
        count += values.numel()
    return math.sqrt(squares / count) if count else 0.0


def _typical(sizes: Mapping[str, float]) -> float:
    return max(sizes.values(), default=1e-30) * _SMALL or 1e-30


def _merged(of_ranks: list[list[Difference]]) -> tuple[Difference, ...]:
    """Return each comparison once, with the largest error of any rank, in order of time."""
    worst: dict[tuple[int, str, str], Difference] = {}
    for found in (found for of_one in of_ranks for found in of_one):
        key = (found.step, found.what, found.name)
        if key not in worst or not worst[key].error >= found.error:
            worst[key] = found
    return tuple(worst.values())
