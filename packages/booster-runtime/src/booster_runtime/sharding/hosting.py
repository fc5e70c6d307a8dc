"""Hosting the user's optimizer: the same object, which steps on this rank's pieces of the model's parameters.

Schedulers hold the optimizer and its groups, so both stay what they are. Groups list the model's parameters, as scripts
know them, and this rank's pieces only while the optimizer itself runs. Its state is that of the pieces.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import ListedGroup, TensorShard, full_box

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.state import TensorMeta

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(eq=False)
class ParameterPiece:
    """The part of one parameter that this rank owns.

    Attributes:
        index: The parameter's number in the model.
        parameter: The parameter of the user's model.
        start: First element of the flattened parameter.
        stop: One past the last.
        values: What the optimizer updates: in the parameter's shape where all of it is here, else 1-D.
    """

    index: int
    parameter: nn.Parameter
    start: int
    stop: int
    values: nn.Parameter

    @property
    def is_whole(self) -> bool:
        """Whether the piece is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()


_STAND_INS = ("booster_runtime.", "booster_hybrid.")
"""Where classes are that parameters have for a time, or in a model that is split."""


def taken_for(shown: nn.Parameter, parameter: nn.Parameter, kind: type | None = None) -> nn.Parameter:
    """Let an optimizer take what it is shown for one of the model's parameters, and return that.

    Optimizers may ask for a parameter's class or attributes in their step: manifolds of Riemannian optimization, or
    factors of the learning rate that a script has set (``weight.lr_mul = 5.0``).

    Args:
        shown: What the optimizer steps on; it gets the parameter's class, and shares its attributes from now on.
        parameter: The model's parameter.
        kind: The class, where it is not that of the parameter.
    """
    if kind is None:
        kind = next(each for each in type(parameter).__mro__ if not each.__module__.startswith(_STAND_INS))
    if issubclass(kind, nn.Parameter):  # else a tensor of another class, whose attributes are its values
        shown.__class__ = kind
        shown.__dict__ = parameter.__dict__
    return shown


class HostedOptimizer:
    """The user's optimizer, seen by the numbers of the model's parameters.

    Args:
        optimizer: The user's optimizer.
        names: Names of the model's parameters by number.

    Attributes:
        groups: For each parameter group, the numbers of its parameters in their order.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.groups: list[list[int]] = []
        self._names = names
        self._pieces: dict[int, ParameterPiece] = {}
        self._shown: list[dict[str, list[Any]]] = []
        self._num_listed: list[int] = []
        self._is_showing = False
        self._name_of: dict[int, str] = {}
        self._guard_state()

    def members(self) -> set[int]:
        """Return the numbers of all parameters that are in a group."""
        return {index for members in self.groups for index in members}

    def states(self) -> dict[int, State]:
        """Return the state of each piece that has one."""
        held = self.optimizer.state
        return {index: held[piece.values] for index, piece in self._pieces.items() if piece.values in held}

    def adopt(self, group_index: int, members: Sequence[int], pieces: Mapping[int, ParameterPiece]) -> None:
        """Take over a group that still lists the model's parameters, and cut the state that they have.

        Args:
            group_index: Which group; the next one after those that were taken over.
            members: The numbers of its parameters.
            pieces: What this rank owns of them.
        """
        group = self.optimizer.param_groups[group_index]
        self._name_of.update(
            (id(each), self._names[index]) for index, each in zip(members, group["params"], strict=True)
        )
        for index, parameter in zip(members, group["params"], strict=True):
            state = self.optimizer.state.pop(parameter, None)
            piece = pieces.get(index)
            if state and piece is not None:
                self.optimizer.state[piece.values] = {
                    key: _cut(key, value, parameter.shape, piece) for key, value in state.items()
                }
        self.groups.append(list(members))
        self._pieces.update(pieces)
        held = [index for index in members if index in pieces]
        # torch keeps names here if the user passed named parameters.
        names = {"param_names": [self._names[index] for index in held]} if "param_names" in group else {}
        self._shown.append({"params": [pieces[index].values for index in held], **names})
        self._num_listed.append(len(group["params"]))

    @property
    def pieces(self) -> list[nn.Parameter]:
        """What the optimizer steps on here."""
        return [piece.values for piece in self._pieces.values()]

    @contextlib.contextmanager
    def showing_pieces(self) -> Iterator[None]:
        """Let the groups list this rank's pieces while the body runs, which is the optimizer's own code.

        Raises:
            ConfigError: If groups, or parameters of one, were added past `add_param_group`, or taken out.
        """
        if self._is_showing:
            yield
            return
        groups = self.optimizer.param_groups
        if len(groups) != len(self._num_listed):
            msg = (
                f"The optimizer has {len(groups)} groups, and had {len(self._num_listed)}. Add groups by "
                "`add_param_group` of the optimizer that `boost` returned, on every rank, and remove none."
            )
            raise ConfigError(msg)
        before = []
        for number, (group, num_listed) in enumerate(zip(groups, self._num_listed, strict=True)):
            if len(group["params"]) != num_listed:
                msg = (
                    f"Group {number} of the optimizer lists {len(group['params'])} parameters, and had {num_listed}. "
                    "Add parameters by `optimizer.add_param_group`; to leave some out, freeze them by "
                    "`parameter.requires_grad_(False)` on every rank."
                )
                raise ConfigError(msg)
            before.append({key: value for key, value in group.items() if key in ("params", "param_names")})
        for group, shown in zip(groups, self._shown, strict=True):
            group.update(shown)
        self._is_showing = True
        try:
            yield
        finally:
            self._is_showing = False
            # Perhaps others than before: `load_state_dict` makes new ones.
            for group, listed in zip(self.optimizer.param_groups, before, strict=True):
                group.update(listed)
            self._guard_state()

    def listed(self) -> list[ListedGroup]:
        """Return the groups as checkpoints see them: all of their parameters, and this rank's pieces of some."""
        return [
            ListedGroup(
                optimizer=self.optimizer,
                group=group,
                names=tuple(self._names[index] for index in members),
                tensors={self._names[index]: self._pieces[index].values for index in members if index in self._pieces},
            )
            for members, group in zip(self.groups, self.optimizer.param_groups, strict=True)
        ]

    def _guard_state(self) -> None:
        """Let asking for the state of one of the model's parameters raise, in place of making an empty one."""
        if type(self.optimizer.state) is not defaultdict:
            return
        owner = self.optimizer
        while isinstance(shown := getattr(type(owner), "state", None), property) and shown.fset is None:
            wrapped = [each for each in vars(owner).values() if isinstance(each, torch.optim.Optimizer)]
            if not wrapped:
                msg = f"{type(owner).__qualname__} shows a state that can't be set. Use plugin='ddp'."
                raise ConfigError(msg)
            owner = wrapped[0]
        owner.state = _StateOfPieces(self._name_of, owner.state)


class _StateOfPieces(defaultdict[Any, Any]):
    """An optimizer's state, by pieces.

    Args:
        name_of: The names of the model's parameters that its groups list, by ``id``.
        state: What there is of it.
    """

    def __init__(self, name_of: Mapping[int, str], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._name_of = name_of

    def __missing__(self, key: Any) -> Any:
        """Make the state of a piece."""
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: Any) -> bool:
        is_here = super().__contains__(key)
        if not is_here and self:
            self._refuse(key)
        return is_here

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or what is given in its place."""
        found = super().get(key, default)
        if found is default and self:
            self._refuse(key)
        return found

    def _refuse(self, key: Any) -> None:
        """Raise if a key is a parameter of the model.

        Raises:
            ConfigError: If so.
        """
        if (name := self._name_of.get(id(key))) is not None:
            msg = (
                f"The optimizer's state of '{name}' is kept by the part of it that this rank steps on, so that "
                "`optimizer.state[parameter]` finds none. `optimizer.state.values()` yields what this rank has of the "
                "state of each parameter, 1-D where that is a part; `booster.save_optimizer` saves all of it."
            )
            raise ConfigError(msg)

    def __reduce__(self) -> Any:
        """Copy and pickle a plain one."""
        return defaultdict, (dict, dict(self))


def numbers_of_group(
    given: Any, index_of: Mapping[int, int], taken: Container[int], names: Mapping[int, str], *, remedy: str
) -> list[int]:
    """Return the numbers of the parameters of a group that is to be added to an optimizer.

    Args:
        given: The group's ``"params"``: a parameter, or parameters, or names and parameters.
        index_of: The numbers of the model's parameters by ``id``.
        taken: The numbers of those that are in a group.
        names: Their names by number.
        remedy: What to do about parameters that are not the model's, for the error.

    Raises:
        ConfigError: If a parameter is not the model's, or is in a group already.
    """
    found = []
    for position, item in enumerate([given] if isinstance(given, torch.Tensor) else given):
        parameter = item[1] if isinstance(item, tuple) else item
        index = index_of.get(id(parameter))
        if index is None:
            msg = (
                f"Parameter {position} of the new group, of shape {tuple(parameter.shape)}, is not one of the "
                f"boosted model's. {remedy}"
            )
            raise ConfigError(msg)
        if index in taken:
            msg = f"Parameter '{names[index]}' is in a parameter group already. Leave it out of the new one."
            raise ConfigError(msg)
        found.append(index)
    return found


def _cut(key: str, value: Any, shape: torch.Size, piece: ParameterPiece) -> Any:
    """Return a piece's part of a whole parameter's state; what is not elementwise stays whole."""
    if not isinstance(value, torch.Tensor):
        return value
    values = piece.values
    if not is_cut(key, value, shape):
        return value.clone()
    dtype = values.dtype if value.is_floating_point() else value.dtype
    part = value.reshape(-1)[piece.start : piece.stop].view(values.shape)
    return part.to(device=values.device, dtype=dtype, copy=True)


def is_cut(key: str | None, value: Tensor, shape: torch.Size) -> bool:
    """Whether a piece's state is elementwise, so that it is cut as the parameter is; a step count never is."""
    return key != "step" and value.shape == shape


def piece_shard(name: str, state: str | None, piece: ParameterPiece, tensor: Tensor, *, is_owner: bool) -> TensorShard:
    """Return the shard of a piece's values, or of a tensor of its state.

    Args:
        name: The parameter's name.
        state: The state's name; ``None`` for values.
        piece: The piece.
        tensor: Cut as the parameter, or with a shape of its own, equal wherever there is a part of the parameter.
        is_owner: Whether this rank writes what it has; of a tensor with a shape of its own, the first part's rank does.
    """
    if not is_cut(state, tensor, piece.values.shape):
        return whole_shard(name, state, tensor, is_owner=is_owner and piece.start == 0)
    shape = tuple(piece.parameter.shape)
    return TensorShard(
        name=name,
        state=state,
        global_shape=shape,
        dtype=tensor.dtype,
        box=full_box(shape),
        flat=None if piece.is_whole else (piece.start, piece.stop),
        data=tensor.detach().view(shape if piece.is_whole else -1),
        is_owner=is_owner,
    )


def whole_shard(name: str, state: str | None, tensor: Tensor, *, is_owner: bool) -> TensorShard:
    """Return the shard of a tensor that is all here."""
    shape = tuple(tensor.shape)
    return TensorShard(
        name=name,
        state=state,
        global_shape=shape,
        dtype=tensor.dtype,
        box=full_box(shape),
        data=tensor.detach(),
        is_owner=is_owner,
    )


def piece_meta(key: str, meta: TensorMeta, piece: ParameterPiece) -> TensorMeta:
    """Return the shape and dtype of a piece's part of a tensor of its parameter's state.

    Args:
        key: The state's name.
        meta: Shape and dtype of the tensor for the whole parameter.
        piece: The piece.
    """
    is_elementwise = key != "step" and meta.shape == tuple(piece.parameter.shape)
    return replace(meta, shape=tuple(piece.values.shape)) if is_elementwise else meta
