"""By what losses are multiplied before backward, and what is known of the gradients that came of them.

The loss scale and the weights of blocks such as `accumulate` are applied by `Booster.backward` alone. A hook on each
parameter, where there are such factors, tells of gradients that came by another way; the next step refuses them.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin.step_agreement import GroupSettings
from booster_core.precision.loss_scaler import DynamicLossScaler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_core.plugin.optimizer import OptimizerWrapper
    from booster_core.precision.policy import PrecisionPolicy

_CALL = "Drop the gradients by `optimizer.zero_grad()`, and call `booster.backward(loss, optimizer)`"
_UNSCALED = (
    "Gradients came of a backward that did not scale its loss, and the step would divide them by the loss scale of "
    f"fp16. {_CALL} in place of `loss.backward()`, or train in 'bf16' or 'fp32'."
)
_UNWEIGHED = (
    "Gradients came of a backward that did not multiply its loss by {weight:g}, as the block around it, of `accumulate`"
    f" or `join`, asks for. {_CALL} in place of `loss.backward()`."
)
_OTHER_WEIGHT = (
    "Gradients came of a loss that was multiplied by {weight:g}, in a block that asks for {own:g} for this model. "
    "Run the backward of each model's loss in blocks of this model alone, and drop the gradients that it gives others."
)


class Replicas(Protocol):
    """Other copies of this run, each launched by itself, whose gradients are averaged with this one's before a step."""

    def average(self) -> None:
        """Average the gradients, with their loss scale, over the copies, unless that is done.

        Collective: every rank of this run.
        """

    def commits(self) -> bool:
        """Return whether the step is taken; where not, the gradients are wrong, and are dropped.

        Collective: every rank of this run.
        """

    def forget(self) -> None:
        """Learn that the gradients were dropped, or are about to be added to."""


class _Weight(NamedTuple):
    """A weight of losses: of one boosted model, or of all where ``of`` is ``None``."""

    value: float
    of: GradientScaling | None


class _Backward:
    """A backward whose loss is multiplied.

    Args:
        weight: What the optimizer multiplies the loss by, next to the loss scale.
        judged: By what the loss is weighed; ``None`` where each microbatch may have a weight of its own.
    """

    def __init__(self, weight: float, judged: float | None) -> None:
        self.weight, self.judged = weight, judged


class LossFactors:
    """What the losses of one Booster are multiplied by: they may be of several models, which share the loss scale.

    Args:
        scaler: The dynamic loss scale, under fp16.

    Attributes:
        scaler: As given.
        scale: By what the gradients that are there were multiplied; a change of the scaler's comes with the next
            backward, so that gradients of all models have one scale. ``None`` before the first backward.
        running: The backward that runs now, and multiplies its loss.
    """

    def __init__(self, scaler: DynamicLossScaler | None = None) -> None:
        self.scaler = scaler
        self.scale: float | None = None
        self.running: _Backward | None = None
        self._weights: list[_Weight] = []
        self._scalings: list[weakref.ref[GradientScaling]] = []

    def __reduce__(self) -> Any:
        return LossFactors, (self.scaler,)  # a copy of an optimizer belongs to no Booster

    def add(self, scaling: GradientScaling) -> None:
        """Share these factors with one more model."""
        self.scaler = scaling.loss_scaler if self.scaler is None else self.scaler
        scaling.factors = self
        self._scalings.append(weakref.ref(scaling))
        if self.scaler is not None:
            self._watch(None)

    @contextlib.contextmanager
    def weighing(self, weight: float, scaling: GradientScaling | None) -> Iterator[None]:
        """Weigh losses of one model, or of all, in a ``with`` block."""
        entered = _Weight(weight, scaling)
        self._weights.append(entered)
        if weight != 1:
            self._watch(scaling)
        try:
            yield
        finally:
            self._weights.remove(entered)

    def weight_of(self, scalings: Sequence[GradientScaling]) -> float:
        """Return by what a loss of some models is weighed: the product of the weights of the blocks around.

        Raises:
            ConfigError: If blocks give the models different weights.
        """
        if not self._weights:
            return 1.0
        own = {weight for each in scalings if (weight := self.own_weight_of(each)) is not None}
        if len(own) > 1:
            msg = (
                f"The loss is of several models, whose blocks (`accumulate`) weigh it by {sorted(own)}. Accumulate "
                "over equally many micro-batches, or give each model a loss and a backward of its own."
            )
            raise ConfigError(msg)
        return own.pop() if own else self._product(None)

    def own_weight_of(self, scaling: GradientScaling) -> float | None:
        """Return by what losses of a model are weighed in a block of its own; ``None`` where there is none."""
        return self._product(scaling) if any(each.of is scaling for each in self._weights) else None

    def _product(self, scaling: GradientScaling | None) -> float:
        return math.prod(each.value for each in self._weights if each.of is None or each.of is scaling)

    @contextlib.contextmanager
    def backward(self, scalings: Sequence[GradientScaling], *, is_weighed: bool = False) -> Iterator[_Backward]:
        """Let backward run in a ``with`` block, and say by what its loss is to be multiplied.

        Args:
            scalings: Of the models whose optimizers step next; their steps are skipped together.
            is_weighed: Losses have been weighed.

        Collective: as `OptimizerWrapper.gradients`, where the loss scale has changed.
        """
        if self.running is not None:
            yield self.running
            return
        self.begin(scalings)
        weight = 1.0 if is_weighed else self.weight_of(scalings)
        self.running = _Backward(weight, None if is_weighed else weight)
        try:
            yield self.running
        finally:
            self.running = None

    def begin(self, scalings: Sequence[GradientScaling]) -> None:
        """Give all gradients that are there the present loss scale.

        Collective: as `OptimizerWrapper.gradients`, where it has changed.
        """
        others = [scaling for each in self._scalings if (scaling := each()) is not None and scaling not in scalings]
        for scaling in (*scalings, *others):
            if scaling in scalings or scaling.has_stepped:
                scaling.end_window()
        for scaling in scalings:
            scaling.partners = [each for each in scalings if each is not scaling]
            scaling.is_awaited = True
            scaling.found_overflow = False
        if self.scaler is None:
            return
        before, self.scale = self.scale, self.scaler.scale
        for optimizer in [optimizer for scaling in (*scalings, *others) for optimizer in scaling.optimizers]:
            optimizer.is_scaled = True
            optimizer.rescale_gradients(self.scale if optimizer.is_unscaled else self.scale / (before or self.scale))

    def _watch(self, scaling: GradientScaling | None) -> None:
        """Watch the gradients of one model, or of all."""
        for each in self._scalings:
            watched = each()
            if watched is not None and scaling in (None, watched):
                watched.watch()


class GradientScaling:
    """What the optimizers of a boosted model know together of its present gradients.

    Args:
        precision: Precision of the run; decides on loss scaling.

    Attributes:
        factors: By what losses are multiplied; those of the Booster, once `boost` is through.
        found_overflow: Whether the unscaled gradients of any of the optimizers overflowed; after a step, whether it was
            skipped.
        norm: The global norm before clipping, until the model's optimizers have stepped.
        replicas: What averages the gradients with other copies of the run; ``None`` where there are none.
        settings: What of the optimizers must not differ between ranks.
        partners: The models that share the present loss, and skip steps together with this one.
        is_awaited: Whether backward was called for an optimizer of the model since it has stepped.
    """

    def __init__(self, precision: PrecisionPolicy | None = None) -> None:
        config = None if precision is None else precision.loss_scale
        self.factors = LossFactors(None if config is None else DynamicLossScaler(config))
        self.found_overflow = False
        self.norm: Tensor | None = None
        self.replicas: Replicas | None = None
        self.settings = GroupSettings()
        self.partners: list[GradientScaling] = []
        self.is_awaited = False
        self._optimizers: list[weakref.ref[OptimizerWrapper]] = []
        self._stepped: set[int] = set()
        self._is_watched = False
        self._judged: _Backward | None = None
        self._refusal: str | None = None
        self._refused: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Optimizers add themselves, also copies.
        own = {"_optimizers": [], "settings": GroupSettings(), "partners": [], "_is_watched": False, "_judged": None}
        return {**self.__dict__, **own}

    @property
    def optimizers(self) -> list[OptimizerWrapper]:
        """The optimizers of the model."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def add(self, optimizer: OptimizerWrapper) -> None:
        """Share this with one more optimizer of the model."""
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer."""
        return [each.optim.param_groups for each in self.optimizers]

    @property
    def loss_scaler(self) -> DynamicLossScaler | None:
        """The dynamic loss scale, under fp16."""
        return self.factors.scaler

    # ---- the window: from a backward to the steps that follow

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped on the present gradients."""
        return bool(self._stepped)

    @property
    def together(self) -> list[GradientScaling]:
        """This, and those that share the present loss."""
        return [self, *self.partners]

    def note_step(self, optimizer: OptimizerWrapper) -> None:
        """Update the loss scale once all optimizers of the models that share a loss have stepped."""
        self._stepped.add(id(optimizer))
        if all(len(each._stepped) >= len(each._optimizers) for each in self.together):  # noqa: SLF001 - of the class
            self.end_window()

    def end_window(self) -> None:
        """Update the loss scale after steps that have been taken; at the latest, the next backward calls it."""
        every = self.together
        scaler = self.loss_scaler
        if scaler is not None and any(each.has_stepped for each in every):
            overflow = any(each.found_overflow for each in every)
            if overflow or any(each.is_awaited for each in every):  # others step on gradients of a loss that counts
                scaler.update(overflow=overflow)
        for each in every:
            each._stepped.clear()  # noqa: SLF001 - of the class
            each.norm, each.partners, each.is_awaited = None, [], False

    # ---- gradients that came by another way

    def watch(self) -> None:
        """Look where gradients come from, from now on."""
        optimizers = self.optimizers
        if optimizers and not self._is_watched:
            self._is_watched = True
            own = weakref.ref(self)  # autograd keeps the hooks

            def note(*_: Any) -> None:
                if (scaling := own()) is not None:
                    scaling.note_gradient()

            optimizers[0].watch_gradients(note)

    def note_gradient(self) -> None:
        """Judge a gradient that has just come, by the backward that runs."""
        running = self.factors.running
        if running is self._judged and running is not None:
            return
        self._judged = running
        if running is None:
            if self.loss_scaler is not None:
                self._refuse(_UNSCALED)
            elif (weight := self.factors.weight_of([self])) != 1:
                self._refuse(_UNWEIGHED.format(weight=weight))
        elif running.judged is not None:
            own = self.factors.own_weight_of(self)
            if own not in (None, running.judged):
                self._refuse(_OTHER_WEIGHT.format(weight=running.judged, own=own))

    def _refuse(self, why: str) -> None:
        if self._refusal is None:
            self._refusal = why
            self._refused = {id(each) for each in self.optimizers}

    def check(self) -> None:
        """Raise where gradients were not multiplied as they should be.

        Raises:
            GradientError: If so.
        """
        if self._refusal is not None:
            raise GradientError(self._refusal)

    def forget(self, optimizer: OptimizerWrapper) -> None:
        """Learn that an optimizer has dropped its gradients."""
        if self._refusal is not None:
            self._refused.discard(id(optimizer))
            if not self._refused:
                self._refusal = None
        if self.replicas is not None:
            self.replicas.forget()
        if not any(each.is_unscaled for each in self.optimizers):
            self.found_overflow = False
