"""Whether an optimizer treats every element alike, or at least every parameter, so that ranks may step on parts.

Torch's own optimizers are known. Any other class gets whole parameters, each on one rank, unless it says that it is
elementwise: by ``is_elementwise = True`` on the class, or the user by ``partition="flat"``.

The first step of such a class is watched (`CouplingCheck`). An optimizer which clips by the norm of all gradients in
its step, as detectron2's, or estimates its step size over all parameters, as D-Adaptation
(https://arxiv.org/abs/2301.07733) and Prodigy (https://arxiv.org/abs/2306.06101), would update each rank's parameters
by another norm.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import is_tensor, optim
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from booster_core.errors import ConfigError
from booster_runtime.muon import Muon, update_cost
from booster_runtime.sharding.ranks import AnyRankFlags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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


_READS_VALUES = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "equal", "allclose"})
_OVERWRITES = frozenset({"copy_", "zero_", "fill_"})
_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NOTHING: frozenset[int] = frozenset()
_T = TypeVar("_T")


class CouplingCheck:
    """Watches the first step of an optimizer whose class nobody has said to update each parameter by itself.

    Args:
        optimizer: The user's optimizer.
        is_unknown: Whether it is watched; else nothing is done.
        device: Of the run.
    """

    def __init__(self, optimizer: Optimizer, *, is_unknown: bool, device: torch.device) -> None:
        self._optimizer = optimizer
        self._is_due = is_unknown
        self._device = device

    def run(self, step: Callable[[], _T]) -> _T:
        """Step, and raise on every rank if the update of a parameter depends on another one's gradient or values.

        Args:
            step: Steps the optimizer, on what its groups list.

        Raises:
            ConfigError: If so.

        Collective: every rank of the world, the first time.
        """
        if not self._is_due:
            return step()
        self._is_due = False
        watch = _Watch(each for group in self._optimizer.param_groups for each in group["params"])
        # What is compiled is not seen.
        compiler: Any = torch.compiler if "torch._dynamo" in sys.modules else None
        try:
            with compiler.set_stance("force_eager") if compiler else contextlib.nullcontext(), watch:
                result = step()
        finally:  # also where it raises: other ranks wait
            is_coupled = any(AnyRankFlags(bytearray([watch.is_coupled]), self._device).wait())
        if is_coupled:
            msg = (
                f"{type(self._optimizer).__qualname__} lets one parameter influence the update of another, as by a "
                "norm or a step size of all: each rank would take that of the parameters that it steps on. Let the "
                "plugin clip (`optimizer.clip_grad_by_norm`), or use plugin='ddp'; where parameters are independent, "
                "pass `partition='parameter'`."
            )
            raise ConfigError(msg)
        return result


class _Watch(TorchFunctionMode):
    """Knows which parameters the tensors of a step come of, and sees what is written into parameters.

    Args:
        stepped: The parameters.
    """

    def __init__(self, stepped: Iterable[Tensor]) -> None:
        super().__init__()
        self.is_coupled = False
        self._known: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}
        self._read = _NOTHING  # what numbers were read of, but for parameters that are written
        self._written: set[int] = set()
        # What each element of a stack of numbers of parameters comes of, such as of their norms.
        self._rows: Any = WeakTensorKeyDictionary()
        found = [each for each in stepped if each.numel()]
        # Where each parameter lies in memory: its first byte, the one after its last, and its number.
        self._place_of = {id(each): _place(each, number) for number, each in enumerate(found)}
        self._places = sorted(self._place_of.values())
        for number, each in enumerate(found):
            self._note(each, frozenset([number]))
            if each.grad is not None:
                self._note(each.grad, frozenset([number]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and follow what its results come of."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == _SETS_DATA:
            self._set_data(*args)
            return result
        if name.startswith(("_foreach", "_fused")):
            self._follow_each(name, args, result)
            return result
        overwrites = name in _OVERWRITES
        came = self._union(tree_leaves((args[1:] if overwrites else args, kwargs)))
        if name in _READS_VALUES:
            self._read |= came - self._written
        elif overwrites:
            self._write(args[0], came, is_write=True)
        elif name == "unbind" and (rows := self._rows.get(args[0])) is not None:
            for made, row in zip(result, rows, strict=True):
                self._note(made, row)
        elif came:
            if torch.is_tensor(result) and (rows := self._rows_of(name, args, kwargs, result)):
                self._rows[result] = rows
            for made in tree_leaves(result):
                # A gradient that is asked for comes of more than the parameter where it was written before.
                self._write(made, came | self._union([made]), is_write=name.endswith("_") or made is kwargs.get("out"))
        return result

    def _follow_each(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Follow a function of lists, which treats one position after the other."""
        lists = [each for each in args if isinstance(each, (list, tuple)) and any(map(torch.is_tensor, each))]
        common = self._union(each for each in args if torch.is_tensor(each))
        makes = isinstance(result, (list, tuple))
        for number in range(len(lists[0]) if lists else 0):
            came = common | self._union(each[number] for each in lists if number < len(each))
            for each in [result] if makes else lists if name.startswith("_fused") else lists[:1]:
                self._write(each[number], came, is_write=not makes or name.endswith("_"))

    def _write(self, made: Any, came: frozenset[int], *, is_write: bool) -> None:
        """Note what a tensor comes of, and whether a parameter was written that is not alone in this."""
        if not isinstance(made, torch.Tensor):
            return
        self._note(made, came)
        place = bisect_right(self._places, (made.data_ptr(), math.inf)) - 1
        if not is_write or place < 0:
            return
        _, end, number = self._places[place]
        if made.data_ptr() < end:
            self.is_coupled |= not (came | self._read) <= {number}
            self._written |= {number}
            self._read = _NOTHING

    def _set_data(self, parameter: Tensor, data: Tensor) -> None:
        """Note a parameter's new values, and where it lies now: its old memory may be another's."""
        came = self._union([data])
        old = self._place_of.get(id(parameter))
        if old is not None:
            del self._places[bisect_left(self._places, old)]
            self._place_of[id(parameter)] = new = _place(parameter, old[2])
            insort(self._places, new)
        self._write(parameter, came, is_write=True)

    def _rows_of(self, name: str, args: Any, kwargs: Any, result: Tensor) -> list[frozenset[int]] | None:
        """Return what each element of a result comes of: of a stack, or what is computed of it element by element."""
        if name == "stack" and len(args) == 1 and not kwargs and result.dim() == 1:
            return [self._union([each]) for each in args[0]]
        taken = [each for each in tree_leaves((args, kwargs)) if torch.is_tensor(each) and self._union([each])]
        found = [self._rows.get(each) for each in taken]
        is_alike = bool(found) and result.shape == taken[0].shape and all(each == found[0] for each in found)
        return found[0] if is_alike else None

    def _union(self, values: Iterable[Any]) -> frozenset[int]:
        found = _NOTHING
        for value in values:
            if isinstance(value, torch.Tensor) and (known := self._known.get(id(value))) and known[0]() is value:
                found |= known[1]
        return found

    def _note(self, tensor: Tensor, came: frozenset[int]) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), came


def _place(parameter: Tensor, number: int) -> tuple[int, int, int]:
    return parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, number
