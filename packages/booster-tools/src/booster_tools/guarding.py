"""`guard`: leave out a step whose gradients are not finite, or far larger than usual, on all ranks together."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Literal

import torch

from booster_core.errors import ConfigError, GradientError
from booster_core.log import log
from booster_core.plugin import OptimizerWrapper, as_tuple
from booster_runtime.memory import is_absent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from typing_extensions import Self

_WINDOW = 64
"""Steps whose median norm a spike is measured against: enough for a median, few enough to follow the training."""
_LEAST = 8
"""Steps before a spike is looked for."""


def guard(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    nan: Literal["skip", "stop"] = "skip",
    spike: float | None = None,
    most_in_a_row: int = 10,
) -> Guard:
    """Watch the global gradient norm of each step in a ``with``, and leave out steps that would spoil the model.

    A step that is left out changes neither parameters nor optimizer state, and counts as ``skipped`` in the metrics of
    hooks and trackers. Buffers that forward has written, such as the statistics of BatchNorm, are put back to the last
    good step. It is decided by the norm, which is the same on every rank, so that all ranks decide alike. The
    norm is that of clipping; where a loop does not clip, it is computed before the step. Each step waits for the
    device to tell it.

    Example::

        with guard(optimizer, nan="skip", spike=10.0) as watch:
            for batch in dataloader:
                ...
                optimizer.step()

    Args:
        optimizer: The boosted optimizer, or those of one model.
        nan: What to do where the norm is infinite or NaN: leave out the step, or raise on every rank before it. Under
            fp16's dynamic loss scale an overflow is neither: that step is skipped anyway.
        spike: Leave out a step too whose norm is more than this many times the median of the last 64.
        most_in_a_row: Raise where more steps in a row are left out: the model, not a batch, is broken.

    Raises:
        TypeError: If an optimizer is not a boosted one.
        ConfigError: If a setting is out of range.
        GradientError: At a step, on every rank, under ``nan="stop"`` or after too many in a row. The parameters are
            those of the last good step, so that a checkpoint that is saved then is healthy.

    Collective: none; called on every rank. Its steps are collective as ``clip_grad_by_norm`` is.
    """
    optimizers = as_tuple(optimizer)
    strange = [type(each).__name__ for each in optimizers or (optimizer,) if not isinstance(each, OptimizerWrapper)]
    if strange:
        msg = f"`guard` needs the optimizer returned by `Booster.boost`; got `{strange[0]}`."
        raise TypeError(msg)
    if nan not in ("skip", "stop"):
        msg = f"`nan={nan!r}` of `guard` is neither 'skip' nor 'stop'."
        raise ConfigError(msg)
    if spike is not None and not 1 < spike < math.inf:
        msg = (
            f"`spike={spike!r}` of `guard` is how many times the usual norm is too much. Use a number above 1, or None."
        )
        raise ConfigError(msg)
    if most_in_a_row < 1:
        msg = f"`most_in_a_row={most_in_a_row}` of `guard` is no number of steps; use 1 or more."
        raise ConfigError(msg)
    return Guard([each for each in optimizers if isinstance(each, OptimizerWrapper)], nan, spike, most_in_a_row)


class Guard:
    """Decides before each step whether it is taken; made by `guard`.

    Attributes:
        num_nonfinite: Steps left out because their norm was infinite or NaN.
        num_spikes: Steps left out because their norm was far larger than usual.
    """

    def __init__(self, optimizers: list[OptimizerWrapper], nan: str, spike: float | None, most_in_a_row: int) -> None:
        self.num_nonfinite = 0
        self.num_spikes = 0
        self._optimizers = optimizers
        self._stops = nan == "stop"
        self._spike = spike
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._decided: Tensor | None = None
        self._refuses = False
        self._buffers = _Buffers()

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._buffers = _Buffers(module for each in self._optimizers[:1] for module in each.model_modules())
        for each in self._optimizers:
            each.before_step.append(self._decide)
        return self

    def __exit__(self, *_: object) -> None:
        """End watching."""
        for each in self._optimizers:
            each.before_step.remove(self._decide)
        self._buffers = _Buffers()

    def _decide(self, optimizer: OptimizerWrapper) -> bool:
        """Return whether to leave out the step."""
        if optimizer.found_overflow:
            self._buffers.restore()
            return False  # the loss scale leaves it out
        norm = optimizer.grad_norm()
        if norm is not self._decided:  # several optimizers share a norm, and a decision
            self._decided, self._refuses = norm, True
            try:
                self._refuses = self._is_too_large(float(norm), optimizer.num_steps + 1)
            finally:
                (self._buffers.restore if self._refuses else self._buffers.keep)()
        return self._refuses

    def _is_too_large(self, norm: float, step: int) -> bool:
        if math.isfinite(norm):
            usual = statistics.median(self._norms) if len(self._norms) >= _LEAST else math.inf
            if self._spike is None or norm <= self._spike * usual:
                self._norms.append(norm)
                self._in_a_row = 0
                return False
            self.num_spikes += 1
            reason = f"the gradient norm {norm:.4g} is more than {self._spike:g} times the usual {usual:.4g}"
        else:
            self.num_nonfinite += 1
            reason = f"the gradient norm is {norm}"
            if self._stops:
                msg = (
                    f"Step {step} is not taken: {reason}. The parameters are those of the step before. Look for the "
                    "operation with `torch.autograd.detect_anomaly()`, or pass `nan='skip'` to `guard`."
                )
                raise GradientError(msg)
        self._in_a_row += 1
        if self._in_a_row > self._most_in_a_row:
            msg = (
                f"{self._in_a_row} steps in a row were left out, the last because {reason}. Go on from an earlier "
                "checkpoint, with a smaller learning rate or clipping; `most_in_a_row` of `guard` allows more."
            )
            raise GradientError(msg)
        log.warning("Step %d is left out: %s.", step, reason)
        return True


class _Buffers:
    """The buffers of a model as of the last good step: forward writes some before anybody can decide.

    Which it writes is not known: the version of BatchNorm's statistics stays the same.

    Args:
        modules: Those of the model.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._kept = {
            (module, name): buffer.detach().clone()
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
            if not is_absent(buffer) and not buffer.is_meta
            if buffer.is_floating_point() or buffer.numel() == 1  # statistics and counts; others are large and constant
        }

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present values."""
        for (module, name), values in self._kept.items():
            buffer = getattr(module, name)
            if values.shape == buffer.shape:
                values.copy_(buffer)
            else:
                self._kept[module, name] = buffer.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the values."""
        for (module, name), values in self._kept.items():
            buffer = getattr(module, name)
            if values.shape == buffer.shape and not buffer.is_inference():
                buffer.copy_(values)
            else:  # forward has put another one there
                setattr(module, name, values.clone())
