"""Splitting backward: input gradients now, weight gradients later, on unmodified models.

The weights of linear layers, split over ranks or not, where nearly all of the time goes, are left out of a
microbatch's autograd graph. Their layers' backward passes on the input's gradient, and keeps the two factors of the
weight's gradient. Later each product is computed by a small graph of its own, through which it reaches the parameter as
any gradient does: every hook of the parameter runs, once. All other parameters (norms, embeddings, biases of other
layers) have small gradients and get them in the first phase. Nothing is computed twice, and of a microbatch's
activations only the factors outlive that phase.

Reference: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 3, for the idea of the split.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from booster_hybrid.mesh import AloneRank
from booster_hybrid.tensor_parallel.linear import RowForward, is_linear
from booster_hybrid.weight_reads import SplitTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor


_OWN = (nn.Parameter, SplitTable)
"""Classes whose values are here."""


class PendingGradients:
    """Weight gradients of one microbatch in one stage, to be computed when there is time.

    Args:
        stage: Number of the stage.
        whole: Parameters whose gradients are not to wait.

    Attributes:
        accepted: The parameters whose layers leave them out of the microbatch's graph.
    """

    def __init__(self, stage: int, whole: frozenset[nn.Parameter]) -> None:
        self.stage = stage
        self._whole = whole
        self._products: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        self._is_open = False
        self.accepted: set[nn.Parameter] = set()

    def may_wait(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter may be left out of the microbatch's own graph."""
        # A tensor hook sees the sum of all that reaches a parameter, so that must come at once.
        has_hooks = bool(parameter._backward_hooks)  # noqa: SLF001 - torch tells it nowhere else
        return parameter not in self._whole and not has_hooks

    def defer(self, parameter: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Leave a part of a parameter's gradient for later; called in backward.

        Args:
            parameter: A parameter that was accepted in forward.
            product: Computes the part, in the parameter's shape and dtype.
        """
        if self._is_open:
            self._products.append((parameter, product))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Keep what is deferred in this context; another backward, inside of a forward, wants no weight's gradient."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def take(self, parameter: nn.Parameter) -> list[Callable[[], Tensor]]:
        """Return what waits for one parameter, which then waits no longer."""
        taken = [product for each, product in self._products if each is parameter]
        if taken:
            self._products = [(each, product) for each, product in self._products if each is not parameter]
        return taken

    def roots(self) -> list[Tensor]:
        """Return tensors whose backward computes all that waits, one product after the other, and accumulates it.

        Returns:
            Scalars, at least one; what gradients they are given does not matter.
        """
        products, self._products = self._products, []
        roots = [_Delivery.apply(*each) for each in reversed(products)]  # type: ignore[no-untyped-call]
        return roots or [torch.zeros((), requires_grad=True)]


class Waiting:
    """Which of an autograd function's parameters get their gradients later, and where to leave these.

    Args:
        pending: Where they are left.
        parameters: All parameters of the function.
        indices: Which of them wait.

    Attributes:
        parameters: As above.
        indices: As above.
    """

    def __init__(
        self, pending: PendingGradients, parameters: Sequence[Tensor | None], indices: Collection[int]
    ) -> None:
        self._pending, self.parameters, self.indices = pending, parameters, indices

    def hidden(self) -> list[Tensor | None]:
        """Return the parameters for autograd, which is not to see those that wait."""
        return [
            each.detach() if each is not None and index in self.indices else each
            for index, each in enumerate(self.parameters)
        ]

    def defer(self, index: int, product: Callable[[], Tensor]) -> bool:
        """Leave a parameter's gradient for later if it waits, and return whether it does.

        Args:
            index: The parameter's place among all.
            product: Computes its gradient, in its shape and dtype.
        """
        parameter: Any = self.parameters[index]
        if index in self.indices:
            self._pending.defer(parameter, product)
        return index in self.indices


@runtime_checkable
class SplitsItself(Protocol):
    """The forward of a layer that defers its weights' gradients by itself, if it is given `weight_gradients`."""

    weight_gradients: SplitBackward | None


class SplitBackward:
    """A model whose linear layers can leave their weights' gradients for later.

    Make it before anything else replaces the layers' forwards. Layers whose forward was replaced take part if it is a
    `SplitsItself`; all others, and linear layers outside of `using`, do what they always do.

    Args:
        model: The model; the forwards of its linear layers are replaced.

    A parameter that is used by other means as well (a tied embedding in the same stage) is found out in the first
    backward of a stage, and does not wait from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pending: PendingGradients | None = None
        self._watched: dict[nn.Parameter, tuple[Any, Any]] = {}
        self._whole: dict[int, frozenset[nn.Parameter]] = {}
        for module in model.modules():
            forward: Any = module.__dict__.get("forward")
            if isinstance(forward, SplitsItself):
                forward.weight_gradients = self
            elif forward is None and is_linear(module):
                alone = RowForward(module, AloneRank(None, 0, 1))
                alone.weight_gradients = self
                module.forward = alone

    def begin(self, stage: int) -> PendingGradients:
        """Return an empty store for a microbatch in a stage."""
        return PendingGradients(stage, self._whole.get(stage, frozenset()))

    @contextlib.contextmanager
    def using(self, pending: PendingGradients) -> Iterator[None]:
        """Let the layers leave gradients in a store, in forward and where backward recomputes layers."""
        before, self._pending = self._pending, pending
        try:
            yield
        finally:
            self._pending = before

    def waiting(self, source: Tensor, parameters: Sequence[Tensor | None]) -> Waiting | None:
        """Return which gradients an autograd function of several products may leave for later; ``None`` for no one.

        Args:
            source: The function's input.
            parameters: What it multiplies the input by, or adds to it.
        """
        pending = self.pending
        if pending is None or not source.requires_grad:  # nothing would come back to the function
            return None
        accepted = {
            index: each
            for index, each in enumerate(parameters)
            if isinstance(each, nn.Parameter) and type(each) in _OWN and each.requires_grad and pending.may_wait(each)
        }
        for each in accepted.values():
            self._watch(each)
            pending.accepted.add(each)
        return Waiting(pending, parameters, accepted.keys()) if accepted else None

    @property
    def pending(self) -> PendingGradients | None:
        """Where gradients may be left now; ``None`` has them computed at once."""
        return self._pending if torch.is_grad_enabled() else None

    def _watch(self, parameter: nn.Parameter) -> None:
        """Find out when something else than a linear layer contributes to a parameter's gradient."""
        node = get_gradient_edge(parameter).node
        known, handle = self._watched.get(parameter, (None, None))
        if known is node:
            return
        if handle is not None:
            handle.remove()

        def on_accumulate(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            return self._complete(parameter, gradients)

        self._watched[parameter] = (node, node.register_prehook(on_accumulate))

    def _complete(
        self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """Add what waits for a parameter to a gradient that reaches it in the first phase, so that it gets it once."""
        pending = self._pending
        if pending is None or parameter not in pending.accepted:
            return None
        self._whole[pending.stage] = self._whole.get(pending.stage, frozenset()) | {parameter}
        total = gradients[0]
        for product in pending.take(parameter):
            total = product() if total is None else total + product()
        return (total,)


class _Delivery(torch.autograd.Function):
    """Computes a part of a parameter's gradient when backward comes by."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, product: Callable[[], Tensor]) -> Tensor:
        ctx.product = product
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        product, ctx.product = ctx.product, None
        return product(), None
