"""Whether an optimizer treats every element alike, so that it may step on any slice of a parameter.

Torch's own optimizers are known. Any other class gets whole parameters, each on one rank, unless it says that it is
elementwise: by ``is_elementwise = True`` on the class, or the user by ``partition="flat"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import is_tensor, optim

from booster_core.errors import ConfigError
from booster_runtime.muon import Muon, update_cost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
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
_BY_MATRIX: frozenset[type[Optimizer]] = frozenset({Muon, getattr(optim, "Muon", Muon)})
OF_TORCH: frozenset[type[Optimizer]] = _ELEMENTWISE | {optim.Adafactor} | _BY_MATRIX
"""Torch's classes that may be sharded, and our Muon: what they remember, they keep by parameter."""


def partition_for(optimizer: Optimizer, asked: str) -> str:
    """Return ``"flat"`` where an optimizer may step on slices, else ``"parameter"``.

    Args:
        optimizer: The user's optimizer.
        asked: ``"flat"`` or ``"parameter"`` is returned as it is; ``"auto"`` looks at the class.

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
    if kind in OF_TORCH:
        return "flat" if kind in _ELEMENTWISE else "parameter"
    if name := _aligned_attribute(optimizer):
        msg = (
            f"{kind.__qualname__} keeps tensors like parameters in the list `{name}`. Its groups list a part of the "
            "parameters once they are sharded, so that it would take those tensors for others'. Keep them in "
            "`optimizer.state[parameter]`, or use plugin='ddp'; where its step does not use them, pass "
            "`partition='parameter'`."
        )
        raise ConfigError(msg)
    return "flat" if getattr(kind, "is_elementwise", False) else "parameter"


def may_couple(optimizer: Optimizer, asked: str) -> bool:
    """Return whether nobody has said that an optimizer updates each parameter by itself; see `partition_for`."""
    kind = type(optimizer)
    return asked == "auto" and kind not in OF_TORCH and not getattr(kind, "is_elementwise", False)


def _aligned_attribute(optimizer: Optimizer) -> str | None:
    """Return the attribute in which an optimizer keeps a list of tensors as its parameters are, as Lookahead does."""
    shapes = {each.shape for group in optimizer.param_groups for each in group["params"] if each.numel() > 1}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        if isinstance(value, optim.Optimizer):
            found = _aligned_attribute(value)
            if found is not None:
                return f"{name}.{found}"
        elif isinstance(value, (list, tuple)):
            listed = [each for part in value for each in (part if isinstance(part, (list, tuple)) else (part,))]
            if any(is_tensor(each) and each.shape in shapes for each in listed):
                return name
    return None


def is_by_matrix(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates each matrix of a parameter's last two dimensions by itself.

    Muon's classes do, and those that say ``is_by_matrix = True``.
    """
    return type(optimizer) in _BY_MATRIX or getattr(type(optimizer), "is_by_matrix", False) is True


def step_cost(parameter: Tensor, *, by_matrix: bool) -> int:
    """Return what stepping on a whole parameter costs, to balance these between ranks.

    Args:
        parameter: The parameter.
        by_matrix: What `is_by_matrix` returned: work goes by the products of matrices then, else by elements.
    """
    return update_cost(parameter.shape) if by_matrix and parameter.dim() > 1 else parameter.numel()


def keeps_blocks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state of a matrix is a tensor made of others: torchao's in few bits.

    Such state can't be cut, nor put together from parts.
    """
    return type(optimizer).__module__.startswith("torchao.")
