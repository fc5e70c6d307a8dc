"""Plain tensors on which the user's optimizer steps, in place of the DTensors of a sharded model.

From the first step on, groups and state hold plain tensors with the memory of the shards: torch dispatches each
operation on a DTensor, some optimizers (Rprop) use operations that it does not support, and fused kernels take no
mixture of both kinds. Whoever asks the boosted optimizer for its groups or state, as torch's own tools do, gets the
model's parameters and DTensors.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from booster_fsdp.parameters import GRADIENT
from booster_runtime.sharding import dtensor_of, is_cut, local_of, sharded_like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer


class Views:
    """Shows the user's optimizer plain tensors in place of the model's parameters.

    Args:
        optimizer: The user's optimizer.

    Attributes:
        of: The tensor that is shown for each parameter; others are not shown. A replicated one is shown itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.of: dict[Any, nn.Parameter] = {}
        self._rows: dict[Any, Any] = {}  # the views of rows, which say as `shown` whose memory they have
        self._lists: list[dict[str, Any]] | None = None  # of each group, without the views
        self._known: dict[int, DTensor] = {}  # those from before, by the ids of their local values

    def add_rows(self, parameter: nn.Parameter) -> None:
        """Show this rank's rows of a parameter, and bring its rows of the state that there is to their device."""
        if not isinstance(parameter, DTensor):
            self.of[parameter] = parameter
            return
        rows = local_of(parameter)
        self.of[parameter] = self._rows[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        self._rows[parameter].shown = parameter._local_tensor  # noqa: SLF001 - `rows` is detached from it
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_cut(key, value, parameter.shape):
                dtype = rows.dtype if value.is_floating_point() else value.dtype
                # Cut where it lies: on the host there is room for all of it.
                part = local_of(sharded_like(value, parameter))
                state[key] = dtensor_of(part.to(device=rows.device, dtype=dtype), parameter)

    def add_whole(self, wholes: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
        """Show whole parameters, and keep the state of those alone.

        Args:
            wholes: What is shown for each parameter; ``None`` for those that other ranks step.
        """
        for parameter, whole in wholes.items():
            if whole is not None:
                self.of[parameter] = whole
            elif parameter in self._optimizer.state:
                del self._optimizer.state[parameter]

    def move_state(self) -> None:
        """Move state that is not cut to the devices and formats of the parameters, as `place_model` does.

        It is small, or of a parameter that this rank steps whole. What `add_rows` has cut is there.
        """
        if self._optimizer.state:
            self._optimizer.load_state_dict(self._optimizer.state_dict())

    def point_at_rows(self) -> None:
        """Let the views of rows have the current memory of the rows and their gradients."""
        for parameter, view in self._rows.items():
            rows, gradient = parameter._local_tensor, GRADIENT.__get__(parameter)  # noqa: SLF001 - `_local`, a call less
            if rows is not view.shown:
                view.data = view.shown = rows
            view.grad = None if gradient is None else gradient._local_tensor  # noqa: SLF001 - as above

    def drop_gradients(self) -> None:
        """Let the views of rows have no gradients."""
        for view in self._rows.values():
            view.grad = None

    def show(self) -> None:
        """Let the optimizer's groups and state hold the views, with plain tensors as their state."""
        if self._lists is not None:
            return
        optimizer, held = self._optimizer, self._optimizer.state
        self._lists = [self._show_group(group) for group in optimizer.param_groups]
        optimizer.state = defaultdict(dict)
        for parameter, state in held.items():
            optimizer.state[self.of.get(parameter, parameter)] = state
            if parameter in self._rows:
                _change(state, DTensor, lambda _, tensor: _noted(self._known, tensor))

    def hide(self) -> None:
        """Let the optimizer's groups and state hold the model's parameters and DTensors."""
        if self._lists is None:
            return
        optimizer, stepped = self._optimizer, self._optimizer.state
        for group, listed in zip(optimizer.param_groups, self._lists, strict=True):
            group.update(listed)
        parameter_of: dict[Any, Any] = {view: parameter for parameter, view in self.of.items()}
        optimizer.state = defaultdict(dict)
        for view, state in stepped.items():
            parameter = parameter_of.get(view, view)
            optimizer.state[parameter] = state
            if parameter in self._rows:
                _change(state, torch.Tensor, functools.partial(_sharded, self._known, parameter))
        self._lists, self._known = None, {}

    def _show_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Let a group list the views, and return its lists from before."""
        shown = [number for number, parameter in enumerate(group["params"]) if parameter in self.of]
        before: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
        group.update({key: [listed[number] for number in shown] for key, listed in before.items()})
        group["params"] = [self.of[parameter] for parameter in group["params"]]
        return before


def _noted(known: dict[int, DTensor], tensor: DTensor) -> torch.Tensor:
    """Return a DTensor's local values, and remember whose they are."""
    local = _local(tensor)
    known[id(local)] = tensor
    return local


def _sharded(known: Mapping[int, DTensor], parameter: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor that a state's local values are of: the one from before, or a new one."""
    if id(tensor) not in known and is_cut(key, tensor, _local(parameter).shape):
        return dtensor_of(tensor, parameter)
    return known.get(id(tensor), tensor)


def _change(state: dict[str, Any], kind: type[torch.Tensor], change: Callable[[str, Any], torch.Tensor]) -> None:
    """Replace the tensors of a class in a parameter's state, also those inside of lists and dicts."""
    for key, value in state.items():
        if isinstance(value, kind):
            state[key] = change(key, value)
        elif isinstance(value, (dict, list, tuple)):
            state[key] = tree_map_only(kind, functools.partial(change, key), value)


def _local(tensor: Any) -> torch.Tensor:
    """Return a DTensor's local values, at less cost than `local_of`, which detaches them."""
    local: torch.Tensor = tensor._local_tensor  # noqa: SLF001
    return local
