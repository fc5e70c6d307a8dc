"""``torch.save(optimizer.state_dict(), "optimizer.pt")``: state by the positions of parameters, given their names.

Such a file names no parameters. Position ``i`` is the ``i``-th parameter of the optimizer that wrote it, group by
group, so it is that of this run's optimizer, if that was made alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.composed import ComposedTensors, Layout
from booster_core.errors import CheckpointError
from booster_core.state import OptimizerInfo, ParamGroup, decode_json, tensor_references

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_checkpoint.load.source import Source


_ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
_ELEMENTWISE |= {"acc_delta", "sum", "prev", "step_size", "ax"}
"""States of torch's optimizers that have their parameter's shape, by which positions are checked."""


def by_name(
    source: Source, here: OptimizerInfo, groups_of_ranks: Sequence[Sequence[ParamGroup]]
) -> tuple[ComposedTensors, OptimizerInfo]:
    """Return an optimizer's tensors under the names of this run's parameters, and its groups and other state.

    Args:
        source: An optimizer's ``state_dict`` as torch saves it.
        here: This run's optimizer.
        groups_of_ranks: Its groups as each rank knows them.

    Raises:
        CheckpointError: If the file is damaged, its groups have other numbers of parameters, or no rank knows the
            positions of all parameters.
    """
    if any([group.params for group in groups] != [group.params for group in here.groups] for groups in groups_of_ranks):
        msg = (
            f"'{source.path}' tells parameters apart by their positions, which no rank of this run knows: each holds "
            "other parameters. Load it under another plugin, and save it there by `save_optimizer`."
        )
        raise CheckpointError(msg)
    try:
        return _named(source, here)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        msg = f"'{source.path}' is not the `state_dict` of an optimizer: {error!r}."
        raise CheckpointError(msg) from error


def _named(source: Source, here: OptimizerInfo) -> tuple[ComposedTensors, OptimizerInfo]:
    saved_groups = source.values["param_groups"]
    sizes = [len(group["params"]) for group in saved_groups]
    expected = [len(group.params) for group in here.groups]
    if sizes != expected:
        msg = (
            f"'{source.path}' is of another optimizer: its parameter groups have {sizes} parameters, those of this one "
            f"{expected}. Build it alike."
        )
        raise CheckpointError(msg)
    names: dict[Any, str] = {}
    groups = []
    for saved, group in zip(saved_groups, here.groups, strict=True):
        names |= dict(zip(saved["params"], group.params, strict=True))
        options = {key: _plain(source, value) for key, value in saved.items() if key not in ("params", "param_names")}
        groups.append(ParamGroup(params=group.params, options=options))
    layouts: dict[str, Layout] = {}
    scalars: dict[str, dict[str, Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for position, states in _pairs(source.values["state"]):
        for state, value in states.items():
            references = tensor_references(value)
            for key in references:
                inner = key.removeprefix(f"state/{position}/")
                layouts[f"{names[position]}/{inner}"] = Layout.of(key, source.tensors[key])
                if inner in _ELEMENTWISE and source.tensors[key].shape != here.shapes[names[position]]:
                    shapes[names[position]] = source.tensors[key].shape
            if not references:
                scalars.setdefault(names[position], {})[state] = decode_json(value)
    return ComposedTensors(source, layouts, {}), OptimizerInfo(groups=tuple(groups), scalars=scalars, shapes=shapes)


def _pairs(state: Any) -> list[tuple[Any, Any]]:
    """Return the entries of an encoded dict, whose keys are positions."""
    return [(key, value) for key, value in state.get("$dict", state.items())]


def _plain(source: Source, value: Any) -> Any:
    """Return an option; a tensor as a number."""
    decoded = decode_json(value, {key: source.read_whole(key) for key in tensor_references(value)})
    return decoded.item() if isinstance(decoded, torch.Tensor) and decoded.numel() == 1 else decoded
