"""What becomes of the user's optimizer while its model is split and cut, before ZeRO makes its own of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors
from booster_runtime.sharding import is_by_matrix, keeps_blocks, partition_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from booster_hybrid.tensor_parallel.split import Split

_STACKED = 3
"""Dimensions of a stack of matrices."""


def check_experts(
    optimizer: Optimizer,
    spread: Mapping[int, str],
    ep_size: int,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Refuse what would take a part of the experts for all of them.

    Args:
        optimizer: The user's optimizer. One that updates matrices by themselves may list stacks of them, of which each
            rank has whole matrices.
        spread: The names of the parameters of experts that are spread over ranks, by ``id``.
        ep_size: Number of these ranks.
        groups: The groups that are looked at; all of the optimizer's by default.

    Raises:
        ConfigError: If the optimizer takes a parameter of experts as a whole.
    """
    groups = optimizer.param_groups if groups is None else groups
    if not spread or partition_for(optimizer, "auto", groups) == "flat":
        return
    for parameter in (each for group in groups for each in group["params"] if id(each) in spread):
        if not is_by_matrix(optimizer) or parameter.dim() < _STACKED:
            msg = (
                f"{type(optimizer).__qualname__} updates '{spread[id(parameter)]}' {tuple(parameter.shape)} as a "
                f"whole, of which `ep_size={ep_size}` leaves each rank a part. Give the parameters of experts to an "
                "optimizer that treats every element alike, such as AdamW, or stacked matrices to "
                "`booster_runtime.Muon`; or use `ep_size=1`."
            )
            raise ConfigError(msg)


def check_state(optimizer: Optimizer, tp_size: int) -> None:
    """Refuse state that can't be cut as the layers are.

    Raises:
        ConfigError: If the optimizer keeps such state.
    """
    if tp_size > 1 and keeps_blocks(optimizer):
        msg = (
            f"{type(optimizer).__qualname__} keeps its state in few bits, by blocks of whole matrices, of which "
            f"`tp_size={tp_size}` leaves each rank a part. Use another optimizer, or `tp_size=1`."
        )
        raise ConfigError(msg)


def cut_state(model: nn.Module, optimizer: Optimizer, splits: Mapping[str, Split]) -> None:
    """Keep this rank's part of the state that an optimizer has already.

    Args:
        model: The model, whose parameters are split.
        optimizer: One of the user's optimizers.
        splits: Which parameters are, by name.
    """
    name_of = NamedTensors.of(model).name_of
    for parameter, state in optimizer.state.items():
        part = splits.get(name_of.get(id(parameter), ""))
        for key, value in state.items():
            if part is not None and hasattr(value, "shape") and tuple(value.shape) == part.global_shape:
                state[key] = part.take(value)


def leave_out(model: nn.Module, optimizer: Optimizer) -> None:
    """Drop from an optimizer what has left the model; groups stay, empty ones too."""
    present = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        is_kept = [id(parameter) in present for parameter in group["params"]]
        for parameter, kept in zip(group["params"], is_kept, strict=True):
            if not kept:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter, kept in zip(group["params"], is_kept, strict=True) if kept]
        if "param_names" in group:
            group["param_names"] = [name for name, kept in zip(group["param_names"], is_kept, strict=True) if kept]
