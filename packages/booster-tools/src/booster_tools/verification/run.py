"""Train a model in one process and under a plugin, and compare the two tensor by tensor."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core.errors import ConfigError
from booster_core.plugin import place_model
from booster_core.precision import NARROW, PrecisionPolicy
from booster_core.state import MASTER, slices_of
from booster_runtime import full_gradient
from booster_runtime.data import move_batch
from booster_runtime.lazy import is_lazy, materialize
from booster_runtime.rounding import relative_error, tolerance_for
from booster_tools.rehearsal import without_dropout
from booster_tools.verification.losses import has_stages
from booster_tools.verification.reference import Reference, floating_leaves, train_reference
from booster_tools.verification.report import Difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer

    from booster_core import Boosted, Booster
    from booster_core.state import StateAdapter, TensorShard
    from booster_tools.verification.losses import Losses

_OF_UPDATES = 10.0
"""How much larger the tolerance of a parameter's update is: optimizers that divide by second moments turn rounding
errors of small gradients into updates of full size."""
_SMALL = 1e-3
"""Tensors that are smaller than this part of the typical one are measured against this part: they may be made of
rounding errors."""
_OF_NOISE = 2.0
"""How far two runs in low precision may be from each other, relative to the distance of one of them from fp32."""


def compare_with_one_process(
    booster: Booster,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    losses: Losses,
    shares: list[Any],
    steps: int,
    *,
    what: str,
    tolerance: float | None = None,
) -> tuple[Difference, ...]:
    """Train a model in this process and under a plugin, and return every comparison.

    Args:
        booster: With the plugin under test; it boosts one model.
        make: Returns the user's model, or its twin, and its optimizer, with the same values each time.
        losses: How the loss of a batch is computed.
        shares: The batch of each data parallel rank.
        steps: Number of training steps, all on these batches.
        what: Who asks, for errors.
        tolerance: As for `verify`.

    Raises:
        ConfigError: If ``make`` returns other values each time.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    with coordinator.together(what):
        reference = _reference_for(booster, make, losses, shares, steps)
        model, optimizer = make()
        if not is_lazy(model):
            _check_same(model, reference.initial)
    index, _ = booster.plugin.data_parallel_coordinates(coordinator)
    dtype = booster.precision.for_model(model).compute_dtype
    limit = tolerance_for(dtype, of_any_model=True).relative if tolerance is None else tolerance
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with without_dropout(model):
        share = move_batch(shares[index], booster.device)
        boosted = booster.boost(model, optimizer)
        found = _Run(booster, boosted, trained, losses, share, index, reference, limit).compare(steps)
    return _merged(coordinator.all_gather_object(found), reference.initial)


def _reference_for(
    booster: Booster,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    losses: Losses,
    shares: list[Any],
    steps: int,
) -> Reference:
    """Train a model in this process, as the ranks of a run together would; in low precision, in fp32 as well."""
    moved = [move_batch(share, booster.device) for share in shares]

    def train(model: nn.Module, optimizer: Optimizer, policy: PrecisionPolicy) -> Reference:
        model = materialize(model)
        place_model(model, optimizer, booster.device, policy)

        def autocast() -> contextlib.AbstractContextManager[Any]:
            if policy.compute_dtype not in NARROW or policy.is_pure:
                return contextlib.nullcontext()
            return torch.autocast(booster.device.type, dtype=policy.compute_dtype)

        with without_dropout(model):
            return train_reference(model, optimizer, losses, moved, steps, autocast)

    model, optimizer = make()
    policy = booster.precision.for_model(model)
    if policy.param_dtype is not None:  # one process steps on the parameters, where a strategy has masters
        policy = replace(policy, param_dtype=policy.master_dtype)
    reference = train(model, optimizer, policy)
    if policy.compute_dtype in NARROW:
        reference.exact = train(*make(), PrecisionPolicy())
    return reference


def _check_same(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name not in values or not torch.equal(parameter.detach().cpu().to(values[name].dtype), values[name]):
            msg = (
                f"`build` makes other weights each time: '{name}' differs between two calls under the same seed. Draw "
                "them from torch's generator, or load them from a file."
            )
            raise ConfigError(msg)


class _Run:
    """The boosted side of a verification.

    Args:
        booster: With the plugin under test.
        boosted: What it boosted.
        trained: Names of the parameters that require gradients.
        losses: How the loss of a batch is computed.
        share: This rank's share of the batch.
        index: Whose share that is.
        reference: What one process did.
        limit: The tolerance of outputs, losses and gradients.
    """

    def __init__(
        self,
        booster: Booster,
        boosted: Boosted,
        trained: list[str],
        losses: Losses,
        share: Any,
        index: int,
        reference: Reference,
        limit: float,
    ) -> None:
        self.booster = booster
        self.trained = trained
        self.model: nn.Module = boosted.model
        self.optimizer: Any = boosted.optimizer
        self.losses = losses
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
        self._parameters("initial parameter", 0, initial, self._sizes(initial), dict.fromkeys(initial, 0.0))
        self._evaluate()
        self.model.train()
        for step in range(1, steps + 1):
            self._step(step)
        updates = {name: self.reference.final[name] - values for name, values in initial.items()}
        sizes = self._sizes(updates)
        # An update that a gradient of rounding errors made says nothing: Adam gives it full size and any sign.
        measured = {name: self.reference.final[name] for name in initial if self._has_signal(name)}
        exact = self.reference.exact
        limits = {
            name: max(
                _OF_UPDATES * self.limit, self._limit(values, None if exact is None else exact.final[name], sizes[name])
            )
            for name, values in measured.items()
        }
        self._parameters("update", steps, measured, sizes, limits)
        masters = (each for each in self._adapter().optimizer_shards() if each.state == MASTER)
        self._parts("update of a master", steps, masters, measured, sizes, limits)
        return self.found

    def _adapter(self) -> StateAdapter:
        return self.booster.state_adapter(self.model)

    def _has_signal(self, name: str) -> bool:
        """Return whether a parameter's gradient was more than rounding errors of larger ones, in any step.

        Elements that are exactly 0, as those of an embedding's rows that no sample has, are no rounding errors.
        """
        for gradients in self.reference.gradients:
            computed = {other: gradient[gradient != 0] for other, gradient in gradients.items()}
            if name in computed and _typical_rms([computed[name]]) > self.limit * _typical_rms(computed.values()):
                return True
        return not any(name in gradients for gradients in self.reference.gradients)

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            loss, outputs = self._forward(backward=False)
        expected, exact = self.reference.outputs[self.index], self.reference.exact
        if outputs is not None:
            found = floating_leaves(outputs)
            for path in expected | found:
                if path not in expected or path not in found:
                    self._add("output", 0, path, math.inf, self.limit)  # of one side only
                    continue
                limit = self._limit(expected[path], None if exact is None else exact.outputs[self.index].get(path))
                self._add("output", 0, path, relative_error(found[path], expected[path]), limit)
        self._loss("evaluation loss", 0, loss, lambda reference: reference.evaluation_losses[self.index])

    def _step(self, step: int) -> None:
        loss, _ = self._forward(backward=True)
        self._loss("loss", step, loss, lambda reference: reference.losses[step - 1][self.index])
        expected, exact = self.reference.gradients[step - 1], self.reference.exact
        sizes = self._sizes(expected)
        for name in self.trained:
            gradient = full_gradient(self.booster, self.model, name)
            wanted = expected.get(name)
            if gradient is None and wanted is None:
                continue
            zero = torch.zeros_like(self.reference.initial[name])
            found = zero if gradient is None else gradient.cpu()
            size = sizes.get(name, _typical(sizes))
            wanted = zero if wanted is None else wanted.cpu()
            limit = self._limit(wanted, None if exact is None else exact.gradients[step - 1].get(name), size)
            self._add("gradient", step, name, relative_error(found, wanted, size), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self, *, backward: bool) -> tuple[Tensor | None, Any]:
        """Return this rank's loss and outputs; ``None`` where another stage of a pipeline has them."""
        if has_stages(self.booster.plugin):
            assert self.losses.criterion is not None, "checked by whoever chose the losses"
            result = self.booster.execute_pipeline(
                iter([self.share]),
                self.model,
                self.losses.criterion,
                self.optimizer if backward else None,
                return_outputs=not backward,
            )
            return result["loss"], result.get("outputs")
        loss, outputs = self.losses.forward(self.model, self.share)
        if backward:
            self.booster.backward(loss, self.optimizer)
        return loss.detach(), outputs

    def _loss(self, what: str, step: int, loss: Tensor | None, of: Callable[[Reference], float]) -> None:
        if loss is not None:
            expected = torch.tensor(of(self.reference))
            size = max(abs(float(expected)), 1e-6)
            exact = self.reference.exact
            limit = self._limit(expected, None if exact is None else torch.tensor(of(exact)), size)
            self._add(what, step, "", abs(float(loss) - float(expected)) / size, limit)

    def _limit(self, expected: Tensor, exact: Tensor | None, size: float | None = None) -> float:
        """Return the tolerance of a tensor: larger than that of all where low precision has a larger effect on it."""
        if exact is None or exact.shape != expected.shape:
            return self.limit
        return max(self.limit, _OF_NOISE * relative_error(exact.cpu(), expected, size))

    def _parameters(
        self,
        what: str,
        step: int,
        expected: Mapping[str, Tensor],
        sizes: Mapping[str, float],
        limits: Mapping[str, float],
    ) -> None:
        """Compare the parts of parameters that are here."""
        self._parts(what, step, self._adapter().model_shards(), expected, sizes, limits)

    def _parts(
        self,
        what: str,
        step: int,
        shards: Iterable[TensorShard],
        expected: Mapping[str, Tensor],
        sizes: Mapping[str, float],
        limits: Mapping[str, float],
    ) -> None:
        """Compare shards of parameters, or of their masters; each may have rounded its values to its format."""
        parts: dict[str, list[float]] = {}
        rounding: dict[str, float] = {}
        for shard in shards:
            whole = expected.get(shard.name)
            if whole is None or not shard.numel:
                continue
            start, stop = shard.flat_range
            wanted = whole[slices_of(shard.box)].reshape(-1)[start:stop]
            error = relative_error(shard.data.detach().cpu().reshape(-1), wanted, sizes[shard.name])
            parts.setdefault(shard.name, []).append(error)
            epsilon = max(torch.finfo(dtype).eps for dtype in (whole.dtype, shard.dtype))
            rounding[shard.name] = epsilon * max(float(whole.double().norm()) / sizes[shard.name], 1.0)
        for name, errors in parts.items():
            self._add(what, step, name, math.hypot(*errors), limits[name] + rounding[name])

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


def _typical_rms(tensors: Any) -> float:
    """Return the root mean square of all elements."""
    squares, count = 0.0, 0
    for values in tensors:
        squares += float(values.double().norm()) ** 2
        count += values.numel()
    return math.sqrt(squares / count) if count else 0.0


def _typical(sizes: Mapping[str, float]) -> float:
    return max(sizes.values(), default=1e-30) * _SMALL or 1e-30


def _merged(of_ranks: list[list[Difference]], initial: Mapping[str, Tensor]) -> tuple[Difference, ...]:
    """Return each comparison once, with the largest error of any rank, in order of time.

    A parameter that no rank's state adapter shows is infinitely far off: nobody could compare it.
    """
    what = "initial parameter"
    shown = {found.name for of_one in of_ranks for found in of_one if found.what == what}
    absent = [
        Difference(what=what, step=0, name=name, error=math.inf, tolerance=0.0)
        for name, values in initial.items()
        if values.numel() and name not in shown
    ]
    worst: dict[tuple[int, str, str], Difference] = {}
    for found in (found for of_one in (absent, *of_ranks) for found in of_one):
        key = (found.step, found.what, found.name)
        if key not in worst or not worst[key].error >= found.error:
            worst[key] = found
    return tuple(worst.values())
