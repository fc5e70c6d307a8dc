"""`ProbeTarget`: a module that gets and returns whole tensors, around what a plan changes; and which are of one kind.

One module of each kind stands for all in the probe. Two are of one kind where they have the same classes, forwards,
shapes and plain attributes, down to all that is inside, and the same rules. What counts the layers of a list is no
difference: a number that is the layer's place in it.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.policy.base import Style
from booster_runtime.data import named_forward

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from booster_hybrid.modules import ModulePatches
    from booster_hybrid.probe.calls import Call
    from booster_hybrid.tensor_parallel.plan import TensorPlan


_DEPTH = 3
_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "training"))


def structural_key(module: nn.Module, place: int | None, rules: Mapping[str, object]) -> Hashable:
    """Return what tells modules apart.

    Args:
        module: The module.
        place: Its index in a list of layers; ``None`` where it is in none.
        rules: What is changed inside, by name within the module.
    """
    found: list[Hashable] = [tuple(sorted((name, repr(rule)) for name, rule in rules.items()))]
    for name, each in module.named_modules():
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype)
            for key, tensor in (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
        )
        attributes = tuple(
            (key, described(value, place)) for key, value in sorted(vars(each).items()) if key not in _OF_MODULES
        )
        found.append((name, type(each), getattr(type(each).forward, "__code__", None), tensors, attributes))
    return tuple(found)


def described(value: Any, place: int | None = None, depth: int = _DEPTH) -> Hashable:
    """Return what tells two values of attributes apart.

    Args:
        value: The value.
        place: A number that stands for the place of what has the attribute; it is a number like others deeper inside.
        depth: How many objects inside of each other are looked into.
    """
    told: Hashable = id(value)  # what can't be looked into is like itself alone
    if type(value) is int and value == place:
        told = "place"
    elif value is None or isinstance(value, (bool, int, float, str, bytes, complex, torch.dtype, torch.device, type)):
        told = value
    elif isinstance(value, torch.Tensor):
        told = tuple(value.shape), value.dtype
    elif isinstance(value, torch.nn.Module):
        told = None
    elif depth > 0 and (inside := _inside(value)) is not None:
        told = tuple((str(key), described(each, depth=depth - 1)) for key, each in inside)
    return type(value), told


def _inside(value: Any) -> list[tuple[object, Any]] | None:
    """Return what makes up an object, with a name or number for each; ``None`` where that can't be seen."""
    found: Iterable[tuple[object, Any]] | None = None
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        found = enumerate((value.__code__.co_code, value.__code__.co_consts, cells, value.__defaults__))
    elif isinstance(value, types.MethodType):
        found = enumerate((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        found = enumerate((value.func, value.args, value.keywords))
    elif isinstance(value, dict):
        found = value.items()
    elif isinstance(value, (list, tuple)):
        found = enumerate(value)
    elif isinstance(value, (set, frozenset)):
        found = enumerate(sorted(value, key=repr))
    elif callable(getattr(value, "tobytes", None)):  # an array of NumPy
        found = enumerate((value.tobytes(), getattr(value, "shape", None)))
    else:
        slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
        if slots or hasattr(value, "__dict__"):
            found = [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]
    return None if found is None else [*found]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


_OPENINGS = frozenset((Style.COLUMN,))
_CLOSINGS = frozenset((Style.ROW,))
_CLOSED = frozenset((Style.COLUMN_GATHER, Style.ROW_SPLIT, Style.HEAD, Style.VOCABULARY))
_SEED = 20231


@dataclass(frozen=True)
class ProbeTarget:
    """A module around some of the changes of a plan.

    Args:
        name: Its name in the model; empty for the model itself.
        module: The module.
        targets: What is changed, by name in the model.
        place: Its index in a list of layers; ``None`` where it is in none.
        layers: The layers that it is or that are in it, list by list.
    """

    name: str
    module: nn.Module
    targets: tuple[str, ...]
    place: int | None = None
    layers: tuple[tuple[nn.Module, ...], ...] = ()

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"layer '{self.name}'" if self.name else "the model"


def units_of(plan: TensorPlan) -> list[ProbeTarget]:
    """Return the smallest modules around the changes of a plan whose inputs and outputs are whole.

    Args:
        plan: The plan.
    """
    modules = plan.names.outermost
    lists = tuple(f"{name}." for name in plan.policy.layers if isinstance(plan.names.modules.get(name), nn.ModuleList))
    waiting: dict[str, set[str]] = defaultdict(set)
    for name in plan.targets:
        waiting[_smallest(plan, name, lists)].add(name)
    found: dict[str, set[str]] = defaultdict(set)
    while waiting:
        longest = max(waiting, key=lambda each: each.count(".") if each else -1)
        targets = waiting.pop(longest)
        if longest and (not _is_callable(modules[longest]) or _is_open(plan, targets)):
            waiting[longest.rpartition(".")[0]] |= targets
        else:
            found[longest] |= targets
    order = list(plan.targets)
    units = []
    for name, targets in sorted(found.items(), key=lambda each: min(map(order.index, each[1]))):
        place = place_of(name)
        layers = () if place is None else ((modules[name],),)
        units.append(ProbeTarget(name, modules[name], tuple(sorted(targets, key=order.index)), place, layers))
    return units


def around(
    plan: TensorPlan, unit: ProbeTarget, kinds: Sequence[Sequence[ProbeTarget]], changes: ModulePatches
) -> ProbeTarget:
    """Return what is around a layer, with one layer of each kind: layers may hand on to each other what is split.

    Args:
        plan: The plan.
        unit: The layer.
        kinds: All units, those of one kind together.
        changes: Notes which layers are left out.
    """
    name = name_around(plan, unit)
    prefix = f"{name}." if name else ""
    inside = [each for each in kinds if each[0].name.startswith(prefix)]
    left_out = {each.name for alike in inside for each in alike[1:]}
    lists = []
    for path, module in plan.names.modules.items():
        if path.startswith(prefix) and isinstance(module, nn.ModuleList):
            kept = {key: each for key, each in module.named_children() if f"{path}.{key}" not in left_out}
            changes.attribute(module, "_modules", kept)
            if any(alike[0].module in kept.values() for alike in inside):
                lists.append(tuple(kept.values()))
    targets = tuple(target for alike in inside for target in alike[0].targets)
    return ProbeTarget(name, plan.names.outermost[name], targets, None, tuple(lists))


def name_around(plan: TensorPlan, unit: ProbeTarget) -> str:
    """Return the name of the module whose forward calls a layer."""
    name = unit.name.rpartition(".")[0]
    while name and not _is_callable(plan.names.outermost[name]):
        name = name.rpartition(".")[0]
    return name


def _smallest(plan: TensorPlan, name: str, lists: Collection[str]) -> str:
    """Return the layer that something is in, or else the smallest module that may be around it."""
    own = next((prefix for prefix in lists if name.startswith(prefix)), None)
    match = re.match(r"(.*?\.)?\d+(?=\.)", name)
    layer = own + name[len(own) :].partition(".")[0] if own else match.group() if match else None
    if layer is not None and layer in plan.names.outermost:
        return layer
    is_closed = plan.targets[name].style in _CLOSED and name in plan.names.outermost
    return name if is_closed else name.rpartition(".")[0]


def _is_callable(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_open(plan: TensorPlan, targets: Collection[str]) -> bool:
    """Return whether some of the changes would let inputs or outputs be split as well."""
    styles = {plan.targets[name].style for name in targets}
    return _OPENINGS.isdisjoint(styles) != _CLOSINGS.isdisjoint(styles)


def place_of(name: str) -> int | None:
    """Return the index of a module in the innermost list that it is in; ``None`` where it is in none.

    Args:
        name: Its name.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[-1] if numbers else None


def calls_of(
    plan: TensorPlan, unit: ProbeTarget, recorded: Call | None, device: torch.device, length: int
) -> Iterator[Call]:
    """Yield calls of a unit to try: as the model calls it for a batch, or on random hidden states alone.

    Args:
        plan: The plan.
        unit: The unit.
        recorded: Its first call in a run of the model; ``None`` where there was none.
        device: Where the tensors are made.
        length: Number of positions of random ones.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    if unit.targets == (unit.name,) and plan.targets[unit.name].style is Style.VOCABULARY:
        table: Any = plan.names.modules[unit.name]
        rows: int = table.weight.shape[0]
        yield (torch.randint(rows, (2, length), generator=generator, device=device),), {}
        return
    width = _width(plan, unit)
    parameters = list(inspect.signature(named_forward(unit.module)).parameters.values())
    is_needed = [each for each in parameters[1:] if each.default is each.empty and each.kind not in (2, 4)]
    takes_hidden = width is not None and bool(parameters) and not is_needed
    if recorded is not None and (len(parameters) != 1 or not takes_hidden):
        yield recorded
    if takes_hidden:
        assert width is not None
        yield (torch.randn(2, length, width, generator=generator, device=device),), {}
    if recorded is not None and len(parameters) == 1 and takes_hidden:
        yield recorded


def _width(plan: TensorPlan, unit: ProbeTarget) -> int | None:
    """Return the size of the hidden states: the number of inputs of the first linear layer that takes them whole."""
    whole = (Style.COLUMN, Style.COLUMN_GATHER, Style.HEAD, Style.ROW_SPLIT)
    for name in unit.targets or plan.targets:
        module = plan.names.modules.get(name)
        if module is not None and plan.targets[name].style in whole:
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            return weight.shape[1 if isinstance(module, nn.Linear) else 0]
    return None


def is_torchs_own(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or embedding whose forward is torch's, which nothing else comes into.

    Args:
        module: The module.
    """
    kind = type(module)
    is_plain = any(each.forward is kind.forward for each in (nn.Linear, nn.Embedding))
    own = vars(module)
    has_hooks = any(value for name, value in own.items() if name.endswith("_hooks"))
    return is_plain and "forward" not in own and not has_hooks
