"""One parameter's optimizer state as named tensors and JSON values, and back.

State may be tensors, numbers, or lists and dicts of these (LBFGS keeps lists of tensors). What is inside of something
is named by its path: ``old_dirs/3``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointError
from booster_core.state.adapter import ParamGroup
from booster_core.state.json_values import (
    decode_json,
    encode_json,
    is_made_of_tensors,
    parts_of_tensors,
    tensor_references,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.state.adapter import JSONValue, TensorMeta

MASTER = "master"


def unsaved_state(optimizer: Optimizer) -> list[str]:
    """Return names of an optimizer's state that belongs to no parameter, and so is in no checkpoint."""
    found = [f"optimizer.state[{key!r}]" for key in optimizer.state if not isinstance(key, torch.Tensor)]
    has_own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if has_own or optimizer._optimizer_state_dict_post_hooks:  # noqa: SLF001 - torch lists them nowhere else
        added = optimizer.state_dict().keys() - {"state", "param_groups"}
        found += [f"optimizer.state_dict()[{key!r}]" for key in sorted(added, key=str)]
    return found


def flatten_state(name: str, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, JSONValue]]:
    """Return the tensors of a parameter's state by their path, and what is not a tensor by its key.

    Args:
        name: The parameter's name, for errors.
        state: As in ``optimizer.state[parameter]``.

    Raises:
        CheckpointError: If something in it is neither a tensor nor a JSON value, or is a part of a tensor that is made
            of others.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JSONValue] = {}
    for key, value in state.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if local is not value and is_made_of_tensors(local):
            msg = _cut(f"'{name}' can't be saved: '{key}' is a part of a {type(local).__name__}")
            raise CheckpointError(msg)
        if isinstance(value, torch.Tensor) and not is_made_of_tensors(value):
            tensors[str(key)] = value
            continue
        try:
            scalars[str(key)] = encode_json(value, str(key), tensors)
        except CheckpointError as error:
            msg = f"The optimizer's state of '{name}' cannot be saved: {error}"
            raise CheckpointError(msg) from error
    return tensors, scalars


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedGroup:
    """A parameter group, by the names of the model's parameters.

    Args:
        optimizer: The user's optimizer.
        group: Its group.
        names: The group's parameters.
        tensors: What the group lists here, by those names: the parameters, or this rank's parts of some.
    """

    optimizer: Optimizer
    group: dict[str, Any]
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def described(self) -> ParamGroup:
        """Return the names and the options; an option that is a tensor, such as a capturable ``lr``, as a number."""
        options = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in self.group.items()
            if key not in ("params", "param_names")
        }
        return ParamGroup(params=self.names, options=options)

    def set_options(self, options: Mapping[str, JSONValue]) -> None:
        """Set options as `described` returned them; one that is a tensor stays the same tensor."""
        for key, value in options.items():
            present = self.group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                self.group[key] = value

    def states(self) -> Iterator[tuple[str, dict[str, Tensor], dict[str, JSONValue]]]:
        """Yield each name, and of the state that is here, the tensors and the rest; see `flatten_state`."""
        held = self.optimizer.state
        for name, tensor in self.tensors.items():
            if tensor in held:
                yield (name, *flatten_state(name, held[tensor]))

    def restore(self, name: str, stored: Mapping[str, TensorMeta], scalars: Mapping[str, JSONValue]) -> dict[str, Any]:
        """Give a tensor that is listed here room for its saved state, and return that; see `restore_state`.

        A saved master is left out, unless the optimizer itself keeps one.

        Args:
            name: The parameter.
            stored: What the checkpoint holds of the tensor.
            scalars: As for `restore_state`.
        """
        tensor, held = self.tensors[name], self.optimizer.state
        present = held.get(tensor, {})
        metas = {key: meta for key, meta in stored.items() if key != MASTER or key in present}
        state = restore_state(tensor, self.group, present, metas, scalars)
        if state:
            held[tensor] = state
        else:
            held.pop(tensor, None)
        return state


def restore_state(
    parameter: Tensor,
    group: Mapping[str, Any],
    present: Mapping[str, Any],
    stored: Mapping[str, TensorMeta],
    scalars: Mapping[str, JSONValue],
) -> dict[str, Any]:
    """Return a parameter's state with room for what a checkpoint holds; tensors are still to be filled.

    Tensors that exist and fit are kept. New ones are made as torch's ``load_state_dict`` makes them (elementwise state
    like the parameter, a step count on the CPU unless the optimizer wants it on the device), except that state which
    was of another type than its parameter stays of that type.

    Args:
        parameter: The parameter.
        group: Its parameter group.
        present: Its state now.
        stored: What the checkpoint holds.
        scalars: The state that is not a tensor, as `flatten_state` returned it.

    Raises:
        CheckpointError: If a tensor that is made of others, of the whole parameter, is to be the state of a part.
    """
    if hasattr(parameter, "to_local"):
        refuse_parts("a parameter can't be loaded", scalars)
    exact = {key for value in scalars.values() for key in parts_of_tensors(value)}
    room = {
        key: torch.zeros(meta.shape, dtype=meta.dtype, device=parameter.device)
        if key in exact
        else _room_for(parameter, group, present.get(key), meta, key)
        for key, meta in stored.items()
    }
    others = {key: decode_json(value, room) for key, value in scalars.items()}
    inside = {key for value in scalars.values() for key in tensor_references(value)}
    restored = {**{key: tensor for key, tensor in room.items() if key not in inside}, **others}
    # The order of an existing state is kept: some optimizers unpack it.
    return {key: restored[key] for key in (*(key for key in present if key in restored), *restored)}


def refuse_parts(what: str, scalars: Mapping[str, JSONValue]) -> None:
    """Raise if the state of a parameter of which each rank has a part holds a tensor that is made of others.

    Such a tensor, as torchao's state in 8 bits, can't be put together from those of parts, nor cut.

    Args:
        what: The parameter and what can't be done, for the error.
        scalars: Its state that is not a tensor, as `flatten_state` returned it.

    Raises:
        CheckpointError: If so.
    """
    exact = [key for value in scalars.values() for key in parts_of_tensors(value)]
    if exact:
        msg = _cut(f"{what}: '{min(exact)}' belongs to a whole tensor, and each rank has a part")
        raise CheckpointError(msg)


def _cut(what: str) -> str:
    return (
        f"The optimizer's state of {what}. Leave out `partition='flat'`, so that this optimizer steps on whole "
        "parameters, or save and load the model alone."
    )


def _room_for(parameter: Tensor, group: Mapping[str, Any], present: Any, meta: TensorMeta, key: str) -> Tensor:
    if isinstance(present, torch.Tensor) and tuple(present.shape) == meta.shape:
        return present
    is_elementwise = meta.shape == tuple(parameter.shape)
    if key == "step":
        on_device = bool(group.get("capturable") or group.get("fused"))
        return torch.zeros(meta.shape, dtype=meta.dtype, device=parameter.device if on_device else "cpu")
    dtype = meta.dtype
    if dtype.is_floating_point and parameter.is_floating_point() and not meta.keeps_dtype:
        dtype = parameter.dtype
    if is_elementwise:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    return torch.zeros(meta.shape, dtype=dtype, device=parameter.device)
