"""What becomes of the user's optimizer while its model is split and cut, before ZeRO makes its own of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors
from booster_runtime.sharding import partition_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from booster_hybrid.tensor_parallel.apply import TensorParallelModel


def check_elementwise(
    optimizer: Optimizer | None, tp_size: int, groups: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Refuse what would take a part of a matrix for the whole.

    Args:
        optimizer: The user's optimizer.
        tp_size: Number of tensor parallel ranks.
        groups: The groups whose settings are looked at; all of the optimizer's by default.

    Raises:
        ConfigError: If the optimizer does not treat every element alike.

    Collective: none.
    """
    if optimizer is not None and tp_size > 1 and partition_for(optimizer, "auto", groups) != "flat":
        msg = (
            f"{type(optimizer).__qualname__} updates whole matrices, of which `tp_size={tp_size}` leaves each rank a "
            "part. Use an optimizer that treats every element alike, such as AdamW, or `tp_size=1`."
        )
        raise ConfigError(msg)


def cut_state(model: nn.Module, optimizer: Optimizer | None, split: TensorParallelModel) -> None:
    """Keep this rank's part of the state that an optimizer has already.

    Collective: none.
    """
    if optimizer is None:
        return
    name_of = NamedTensors.of(model).name_of
    for parameter, state in optimizer.state.items():
        part = split.splits.get(name_of.get(id(parameter), ""))
        for key, value in state.items():
            if part is not None and hasattr(value, "shape") and tuple(value.shape) == part.global_shape:
                state[key] = part.take(value)


def leave_out(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Drop from an optimizer what has left the model; groups stay, empty ones too.

    Collective: none.
    """
    if optimizer is None:
        return
    present = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        is_kept = [id(parameter) in present for parameter in group["params"]]
        for parameter, kept in zip(group["params"], is_kept, strict=True):
            if not kept:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter, kept in zip(group["params"], is_kept, strict=True) if kept]
        if "param_names" in group:
            group["param_names"] = [name for name, kept in zip(group["param_names"], is_kept, strict=True) if kept]
