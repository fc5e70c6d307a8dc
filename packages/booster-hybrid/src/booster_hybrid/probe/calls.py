"""How a model calls its layers, what it reads of their parameters elsewhere, and the batches on which that is seen.

A batch for a probe has so many positions that these can be told from all other sizes. A second one has the length of
the user's own, as layers may compute something else from longer sequences.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.modules import ModulePatches
from booster_hybrid.torch_functions import FACTS, name_of
from booster_runtime.data import call_with, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn


Call = tuple[tuple[Any, ...], dict[str, Any]]
_DEPTH = 6
_FACTS = frozenset((*FACTS, "shape", "size"))


@dataclass
class RecordedCalls:
    """What a run of a model has shown.

    Attributes:
        calls: The first call of each module that was watched, by its name; the tensors are copies.
        reads_outside: Parameters that a function read outside of the modules that hold them, with the function's name.
        failure: Why the run ended before the model did; ``None`` where it came through.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    reads_outside: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


class Watch(TorchFunctionMode):
    """Notes the parameters that functions get while none of the modules that hold them runs.

    Args:
        names: The parameters, by ``id``, with their names.

    Attributes:
        found: Names of the parameters, with the function that read them.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._running: Counter[int] = Counter()
        self.found: dict[str, str] = {}

    def allow(self, key: int, module: nn.Module, changes: ModulePatches) -> None:
        """Let a parameter be read while a module runs.

        Args:
            key: The parameter's ``id``.
            module: The module.
            changes: Notes the hooks.
        """
        changes.hook(module.register_forward_pre_hook(lambda *_: self._running.update([key])))
        changes.hook(module.register_forward_hook(lambda *_: self._running.subtract([key]), always_call=True))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function."""
        del types
        for each in (*args, *(kwargs or {}).values()):
            for value in each if isinstance(each, (list, tuple)) else (each,):
                name = self._names.get(id(value))
                if name is not None and not self._running[id(value)] and name_of(func) not in _FACTS:
                    self.found.setdefault(name, name_of(func))
        return func(*args, **(kwargs or {}))


Split = tuple[str, list["nn.Module"]]
"""The name of a parameter that is to be split, and the modules that may read it."""


def record_calls(
    model: nn.Module,
    batch: Any,
    watched: Mapping[str, nn.Module],
    alike: Mapping[nn.Module, str],
    split: Mapping[int, Split],
) -> RecordedCalls:
    """Run a model on a batch, and note how it calls some of its modules.

    Layers of a kind that has run already are passed over: they return what the first one has returned.

    Args:
        model: The model.
        batch: What it takes.
        watched: The modules, by name.
        alike: Layers that are like a watched one, with its name.
        split: The parameters that are to be split, by ``id``.
    """
    recording, changes = RecordedCalls(), ModulePatches()
    watch = Watch({key: name for key, (name, _) in split.items()})
    _note_calls(recording, watched, alike, changes)
    for key, (_, readers) in split.items():
        for reader in readers:
            watch.allow(key, reader, changes)
    for each in model.modules():
        changes.attribute(each, "training", value=False)
    try:
        with watch, torch.enable_grad(), eager():
            call_with(model, taken_by(model, batch))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the batch may need what a training loop does to it first
        recording.failure = f"{type(error).__name__}: {error}"
    finally:
        changes.undo()
    recording.reads_outside = watch.found
    return recording


def _note_calls(
    recording: RecordedCalls, watched: Mapping[str, nn.Module], alike: Mapping[nn.Module, str], changes: ModulePatches
) -> None:
    returned: dict[str, Any] = {}

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
        recording.calls.setdefault(name, copied((args, kwargs)))

    def keep(_: nn.Module, __: Any, output: Any, *, name: str) -> None:
        returned.setdefault(name, output)

    def pass_over(*args: Any, forward: Callable[..., Any], name: str, **kwargs: Any) -> Any:
        return returned[name] if name in returned else forward(*args, **kwargs)

    for name, module in watched.items():
        changes.hook(module.register_forward_pre_hook(functools.partial(note, name=name), with_kwargs=True))
        changes.hook(module.register_forward_hook(functools.partial(keep, name=name)))
    for module, name in alike.items():
        changes.forward(module, functools.partial(pass_over, forward=module.forward, name=name))


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Let what is compiled run as it is written, in this context."""
    with torch.compiler.set_stance("force_eager"):
        yield


def copied(values: Any) -> Any:
    """Return copies of values whose tensors, also those inside of caches, are leaves that need gradients as before."""
    memo: dict[int, Any] = {id(each): _leaf(each) for each in _tensors(values, _DEPTH)}
    try:
        return copy.deepcopy(values, memo)
    except Exception:  # noqa: BLE001 - what can't be copied is shared
        return pytree.tree_map_only(torch.Tensor, _leaf, values)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad and value.is_floating_point())


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in containers and attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and not isinstance(value, (torch.nn.Module, type)):
        inside = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", {})
        for each in inside.values() if isinstance(inside, dict) else inside:
            yield from _tensors(each, depth - 1)


MOST_POSITIONS = 128
"""Most positions of the first sequences in a probe, but where a model takes none so short."""
_ENOUGH = 32
"""Positions of a shorter sequence that is repeated."""
_MOST_ELEMENTS = 1 << 26
"""Of the largest activations of longer ones: 512 MiB in fp64, on each rank."""


def _positions_of(given: Any) -> tuple[Tensor, int] | None:
    """Return the tokens of a batch, or its hidden states, and their dimension that runs over positions."""
    rows = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor) and each.dim() > 1]
    tokens = ((each, each.dim() - 1) for each in rows if not each.is_floating_point())
    return next(tokens, None) or next(((each, 1) for each in rows if each.dim() == 3), None)


def calls_of_model(model: nn.Module, batch: Any, size: int) -> Iterator[Call]:
    """Yield calls of a model with the sequences of a batch cut or repeated to a clear number, then as they are.

    Masks hide nothing in it: what positions compute that see no other one is nobody's business, and may differ. Where
    there are as many images as a batch has tokens for them, sequences can only go on by more of their last tokens.

    Args:
        model: The model.
        batch: What it takes.
        size: Number of ranks over which sequences are split, each of which gets equally many positions.
    """
    given = taken_by(model, batch)
    found = _positions_of(given)
    if found is not None:
        rows, along = found
        samples, length = max(rows.shape[0], 2), rows.shape[along]
        for longest in (min(max(length, _ENOUGH), MOST_POSITIONS), min(length, MOST_POSITIONS)):
            clear = clear_number(model, samples, longest // size)
            if clear is not None:
                yield as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_with, length, clear * size), given))
        least = -(-length // size)
        clear = clear_number(model, samples, 2 * least, least)
        if clear is not None and not is_clear(model, samples, length):
            yield as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_longer, length, clear * size), given))
    yield as_call(given)


def call_of_other_length(model: nn.Module, batch: Any, size: int, compared: Call) -> Call | None:
    """Return a call with as many positions as a batch has, as far as memory allows, or with fewer than were compared.

    Args:
        model: The model.
        batch: What it takes.
        size: Number of ranks over which sequences are split.
        compared: A call that was compared already.

    Returns:
        ``None`` for batches without sequences.
    """
    given = taken_by(model, batch)
    found, before = _positions_of(given), _positions_of(compared)
    if found is None or before is None:
        return None
    rows, along = found
    length, widest = rows.shape[along], max((max(each.shape, default=1) for each in model.parameters()), default=1)
    wanted = min(length, max(MOST_POSITIONS, _MOST_ELEMENTS // (max(rows.shape[0], 2) * widest)))
    if wanted < size or wanted == before[0].shape[before[1]]:
        wanted = max(size, wanted // 2)
    return as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_with, length, wanted), given))


def is_clear(module: nn.Module, samples: int, positions: int) -> bool:
    """Return whether a number of positions can be told from all other sizes: none is a multiple of it.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        positions: The number.
    """
    sizes = {samples} | {size for each in module.parameters() for size in each.shape if size}
    return positions > 1 and all(size % positions for size in sizes)


def clear_number(module: nn.Module, samples: int, longest: int, least: int = 3) -> int | None:
    """Return the largest number of positions, up to a limit, of which no other size is a multiple; ``None`` for none.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        longest: The limit.
        least: The least number.
    """
    primes = (each for each in range(longest, max(least, 3) - 1, -1) if all(each % factor for factor in range(2, each)))
    return next((each for each in primes if is_clear(module, samples, each)), None)


def _with(length: int, wanted: int, value: Tensor) -> Tensor:
    """Return an argument for another number of positions: some of these, or these again and again."""
    if value.dim() < 2:
        return value
    if value.shape[0] == 1:
        value = torch.cat([value, value])  # or what there is for each token can't be told from what is for a position
    dims = [dim for dim, size in enumerate(value.shape) if dim > 0 and size == length]
    if value.is_floating_point() and value.dim() == 3:
        dims = dims[:1]  # hidden states may be as wide
    for dim in dims:
        value = torch.cat([value] * -(-wanted // length), dim).narrow(dim, 0, wanted)
    is_mask = not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
    return torch.ones_like(value) if is_mask else value


def _longer(length: int, wanted: int, value: Tensor) -> Tensor:
    """Return an argument for more positions, which repeat its last one."""
    if value.dim() < 2 or value.shape[-1] != length or value.is_floating_point():
        return value
    return torch.cat([value, value[..., -1:].expand(*value.shape[:-1], wanted - length)], -1)


def as_call(given: Any) -> Call:
    """Return the arguments of a call.

    Args:
        given: What a model takes of a batch.
    """
    if hasattr(given, "keys"):
        return (), {**given}
    return (tuple(given), {}) if isinstance(given, (list, tuple)) else ((given,), {})


def with_choices(batch: Any) -> list[Any]:
    """Return a batch, and another one that has several choices for each sample.

    Args:
        batch: What a model's forward takes, whose token indices are of shape ``(samples, positions)``.
    """
    return [batch, pytree.tree_map_only(torch.Tensor, lambda each: torch.stack([each, each], 1), batch)]
