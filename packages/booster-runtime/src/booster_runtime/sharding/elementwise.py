"""Whether an optimizer treats every element alike, so that it may step on any slice of a parameter.

torch's own optimizers are declared. Of any other class a probe steps small tensors in both ways: a matrix, and the same
numbers flattened and cut in two, must agree bit for bit after several steps; so must one of hundreds of rows and
columns, as some factor their state from some size on, or keep it in few bits by blocks, and one of four dimensions.
Each parameter group with settings of its own is tried: some classes treat matrices in one group, and elements in
another. Where they do not agree, parameters stay whole: that is right for every optimizer whose parameters don't
influence each other, which is tried out as well.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn, optim

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adadelta,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Rprop,
        optim.ASGD,
    }
)
WHOLE: frozenset[type[Optimizer]] = frozenset({optim.Adafactor, *([optim.Muon] if hasattr(optim, "Muon") else [])})
_SHAPE, _STEPS = (6, 5), 20
_FURTHER_SHAPES = ((256, 136), (4, 3, 2, 2))
"""The first one is a whole number of blocks, of up to 2,048 elements; its halves are not."""
_LEARNING_RATE = 1e-2
"""What a probe takes in place of none: schedulers that warm up begin with zero, which updates nothing."""
_OF_GROUP = frozenset({"params", "param_names", "lr", "initial_lr"})
"""What tells nothing of how a group is treated."""
_RUN_STATE = ("state", "param_groups", "step")
"""What a probe gets of its own. ``step`` is there where a scheduler has wrapped the optimizer's method."""


def partition_for(optimizer: Optimizer, asked: str, groups: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return ``"flat"`` where an optimizer may step on slices, else ``"parameter"``.

    Args:
        optimizer: The user's optimizer.
        asked: ``"flat"`` or ``"parameter"`` is returned as it is; ``"auto"`` looks.
        groups: The groups whose settings are looked at; all of the optimizer's by default.

    Raises:
        ConfigError: If the optimizer can't step on a part of the parameters at all.

    Collective: none; the answer is the same on every rank.
    """
    kind = type(optimizer)
    if isinstance(optimizer, optim.LBFGS):
        msg = (
            "LBFGS can't be sharded: its line search and its history run over all parameters as one vector. "
            "Use plugin='ddp', or another optimizer."
        )
        raise ConfigError(msg)
    if isinstance(optimizer, optim.SparseAdam):
        msg = "SparseAdam takes sparse gradients, which are dense once reduced. Use Adam, or plugin='ddp'."
        raise ConfigError(msg)
    if asked != "auto":
        return asked
    if kind in ELEMENTWISE:
        return "flat"
    if kind in WHOLE:
        return "parameter"
    found = [
        _probed(optimizer, group) for group in distinct_groups(optimizer.param_groups if groups is None else groups)
    ]
    return "flat" if all(partition == "flat" for partition in found) else "parameter"


def keeps_blocks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state of a matrix is a tensor made of others, such as torchao's in few bits.

    Such state can't be cut, nor put together from parts.
    """
    if type(optimizer) in ELEMENTWISE | WHOLE:
        return False
    with torch.random.fork_rng(devices=[]):
        value = torch.randn(_FURTHER_SHAPES[0])
    for group in distinct_groups(optimizer.param_groups):
        try:
            [state] = probed_steps(optimizer, group, [value], [[value]]).states
        except Exception:  # noqa: BLE001, S112 - `partition_for` tells of it
            continue
        if any(hasattr(entry, "__tensor_flatten__") for entry in state.values()):
            return True
    return False


def check_takes_parts(optimizer: Optimizer, asked: str, group: Mapping[str, Any]) -> None:
    """Check that an optimizer whose parameters are cut may step on parts of a further group's.

    Args:
        optimizer: The user's optimizer.
        asked: As for `partition_for`.
        group: The group, with all settings.

    Raises:
        ConfigError: If it can't.

    Collective: none; the answer is the same on every rank.
    """
    if partition_for(optimizer, asked, [group]) != "flat":
        msg = (
            f"{type(optimizer).__qualname__} takes the parameters of the new group as wholes, and `boost` has cut "
            "them, as the other groups allow. Add the group before `boost`, or pass `partition='parameter'` to the "
            "plugin."
        )
        raise ConfigError(msg)


def distinct_groups(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one parameter group of each set of settings, whatever parameters and learning rate it has."""
    distinct: list[Mapping[str, Any]] = []
    for group in groups:
        if not any(_has_same_settings(group, other) for other in distinct):
            distinct.append(group)
    return distinct


def _has_same_settings(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = group.keys() - _OF_GROUP
    return names == other.keys() - _OF_GROUP and all(_is_same(group[name], other[name]) for name in names)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001 - what can't be compared may differ
        return False


def _probed(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = torch.randn(_SHAPE), torch.randn(_SHAPE)
        ones, others = _gradients(_SHAPE), [100 * each for each in _gradients(_SHAPE)]
    name = f"The optimizer {type(optimizer).__qualname__}{_position(optimizer, group)}"
    try:
        of_first = probed_steps(optimizer, group, [first], [[grad] for grad in ones])
        of_second = probed_steps(optimizer, group, [second], [[grad] for grad in others])
        together = probed_steps(optimizer, group, [first, second], list(zip(ones, others, strict=True))).values
    except Exception as cause:
        msg = (
            f"{name} could not be tried on a parameter of shape {_SHAPE}: {cause}. "
            "Say whether it treats every element alike: `partition='flat'` if so, else `partition='parameter'`."
        )
        raise ConfigError(msg) from cause
    alone, also_alone = of_first.values[0], of_second.values[0]
    if torch.equal(alone, first):
        msg = (
            f"{name} does not update parameters that its `param_groups` list, so "
            "it can't be given shards. Let its `step` read `self.param_groups`, or use plugin='ddp'."
        )
        raise ConfigError(msg)
    if not (torch.equal(together[0], alone) and torch.equal(together[1], also_alone)):
        msg = (
            f"{name} lets one parameter influence the update of another, "
            "which needs all of them on every rank. If that is a clipping of its own, switch it off and let the plugin "
            "clip (`max_norm`); else use plugin='ddp'."
        )
        raise ConfigError(msg)
    written = [name for name, value in of_first.settings.items() if not _is_same(value, of_second.settings.get(name))]
    if written:
        msg = (
            f"{name} computes '{written[0]}' of its groups from gradients or parameters, "
            "of which each rank would have others. Use plugin='ddp'; where it only records it, pass "
            "`partition='flat'` or `partition='parameter'`."
        )
        raise ConfigError(msg)
    if not _is_same_in_halves(optimizer, group, first, ones, alone):
        return "parameter"
    for shape in _FURTHER_SHAPES:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            value, grads = torch.randn(shape), _gradients(shape)
        try:
            whole = probed_steps(optimizer, group, [value], [[grad] for grad in grads]).values[0]
        except Exception:  # noqa: BLE001, S112 - it takes no such tensor, so the model has none
            continue
        if not _is_same_in_halves(optimizer, group, value, grads, whole):
            return "parameter"
    return "flat"


def _position(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Return which of several groups is meant, for a message; nothing where all have the same settings."""
    groups = optimizer.param_groups
    number = next((number for number, other in enumerate(groups) if other is group), 0)
    return f", with the settings of parameter group {number}," if len(distinct_groups(groups)) > 1 else ""


def _is_same_in_halves(
    optimizer: Optimizer, group: Mapping[str, Any], value: Tensor, gradients: Sequence[Tensor], expected: Tensor
) -> bool:
    try:
        halves = probed_steps(optimizer, group, _halves(value), [_halves(grad) for grad in gradients]).values
    except Exception:  # noqa: BLE001 - whatever it minds about vectors, it can have matrices
        return False
    return torch.equal(torch.cat(halves), expected.flatten())


def _gradients(shape: Sequence[int]) -> list[Tensor]:
    """Return a gradient for each step. They have much in common: step sizes that are estimated grow by that."""
    common = torch.randn(shape)
    return [common + 0.5 * torch.randn(shape) for _ in range(_STEPS)]


def _halves(tensor: Tensor) -> list[Tensor]:
    flat = tensor.flatten()
    cut = len(flat) // 2 - 2  # within a row
    return [flat[:cut].clone(), flat[cut:].clone()]


class Probed(NamedTuple):
    """What steps of a probe have led to.

    Args:
        values: What its parameters have become.
        states: What it keeps of each.
        settings: The entries of its group but for the parameters.
    """

    values: list[Tensor]
    states: list[dict[str, Any]]
    settings: dict[str, Any]

    def equals(self, other: Probed) -> bool:
        """Return whether two probes are the same, bit for bit."""
        return (
            all(map(_is_same, self.values, other.values))
            and all(map(_has_same_entries, self.states, other.states))
            and _has_same_entries(self.settings, other.settings)
        )


def _has_same_entries(entries: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return entries.keys() == others.keys() and all(_is_same(value, others[name]) for name, value in entries.items())


def probed_steps(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    *,
    in_parts: bool = False,
) -> Probed:
    """Take steps from some values with an optimizer like the user's, with the settings of a group of it.

    Args:
        optimizer: The user's optimizer; left alone.
        group: The group.
        values: What to start from.
        gradients: For each step, one gradient for each value.
        in_parts: Call ``step`` for one value after the other, instead of once.
    """
    with torch.compiler.set_stance("force_eager"):  # some compile their step, for each shape
        try:
            return _steps(optimizer, group, values, gradients, [{} for _ in values], in_parts=in_parts)
        except KeyError:  # of a class whose constructor makes the state, as Adagrad's of torch 2.10
            states = [_as_constructed(optimizer, group, value) for value in values]
            if not all(states):
                raise
        return _steps(optimizer, group, values, gradients, states, in_parts=in_parts)


def _as_constructed(optimizer: Optimizer, group: Mapping[str, Any], value: Tensor) -> dict[str, Any]:
    """Return state for a value like that of a parameter of a group; of each tensor, the first element everywhere."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state and parameter.numel():
            return {
                name: torch.full_like(value, entry.flatten()[0].item(), dtype=entry.dtype)
                if isinstance(entry, torch.Tensor) and entry.shape == parameter.shape
                else copy.deepcopy(entry)
                for name, entry in state.items()
            }
    return {}


def _steps(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    states: Sequence[dict[str, Any]],
    *,
    in_parts: bool,
) -> Probed:
    kind: Any = type(optimizer)
    known = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    probe = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            probe.__dict__[name] = OrderedDict()  # the user's hooks are not for probes
        elif name not in _RUN_STATE:
            probe.__dict__[name] = copy.deepcopy(value, dict(known))
    probe.state = defaultdict(dict)
    parameters = [nn.Parameter(value.clone()) for value in values]
    probe.state.update(zip(parameters, states, strict=True))
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    if "lr" in settings and settings["lr"] is not None and not settings["lr"]:
        settings["lr"] += _LEARNING_RATE
    probe.param_groups = [{**settings, "params": parameters}]
    for grads in gradients:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        for part in [[parameter] for parameter in parameters] if in_parts else [parameters]:
            probe.param_groups[0]["params"] = part
            kind.step(probe)
        probe.param_groups[0]["params"] = parameters
    left = {name: value for name, value in probe.param_groups[0].items() if name != "params"}
    return Probed([each.detach() for each in parameters], [probe.state.get(each, {}) for each in parameters], left)
