"""How a model calls its layers, and what it reads of their parameters elsewhere: seen while it runs on a batch once."""

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
from booster_hybrid.layer_plan import ModulePatches
from booster_hybrid.torch_functions import FACTS, name_of
from booster_runtime.data import call_with, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
_DEPTH = 6
_FACTS = frozenset((*FACTS, "shape", "size"))


@dataclass
class Recording:
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
    *,
    is_training: bool = False,
) -> Recording:
    """Run a model on a batch, and note how it calls some of its modules.

    Layers of a kind that has run already are passed over: they return what the first one has returned.

    Args:
        model: The model.
        batch: What it takes.
        watched: The modules, by name.
        alike: Layers that are like a watched one, with its name.
        split: The parameters that are to be split, by ``id``.
        is_training: Whether its modules are in training mode.
    """
    recording, changes = Recording(), ModulePatches()
    watch = Watch({key: name for key, (name, _) in split.items()})
    _note_calls(recording, watched, alike, changes)
    for key, (_, readers) in split.items():
        for reader in readers:
            watch.allow(key, reader, changes)
    for each in model.modules():
        changes.attribute(each, "training", value=is_training)
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
    recording: Recording, watched: Mapping[str, nn.Module], alike: Mapping[nn.Module, str], changes: ModulePatches
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
