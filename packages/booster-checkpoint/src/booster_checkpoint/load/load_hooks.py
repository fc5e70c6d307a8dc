"""What a model's own load hooks make of a file's tensors: old names, other layouts, as in ``load_state_dict``.

Hooks and ``_load_from_state_dict`` run on tensors without values first. What they only rename is then read in parts,
like everything else; what they compute is computed once more from values, whole, on the ranks that have the module.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_checkpoint.files.composed import ComposedTensors, Layout
from booster_core.errors import CheckpointError
from booster_core.state import TensorMeta, named_modules, overrides_load, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from booster_core.matching import Expectation
    from booster_core.state import Box


_REMEDY = "That can't be done for a checkpoint that is read in parts: load it into the model before `boost`."


@dataclass(frozen=True)
class Renaming:
    """What load hooks do, by names alone.

    Args:
        sources: For each name that is there afterwards, the name in the file of the tensor that it is.
        computed: What hooks compute, by name.
        gone: Names of the file that are not there afterwards.
    """

    sources: dict[str, str] = field(default_factory=dict)
    computed: dict[str, TensorMeta] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether hooks do anything."""
        return bool(self.sources or self.computed or self.gone)


class HookedTensors(ComposedTensors):
    """A checkpoint's tensors after load hooks.

    Args:
        named: The tensors before them.
        renamings: What hooks do on each rank; ranks may have other modules.
        computed: The values that this rank has computed.
    """

    def __init__(self, named: ComposedTensors, renamings: Iterable[Renaming], computed: Mapping[str, Tensor]) -> None:
        layouts = dict(named.layouts)
        told = list(renamings)
        for name in (name for each in told for name in each.gone):
            layouts.pop(name, None)
        for each in told:
            layouts |= {name: named.layouts[source] for name, source in each.sources.items()}
            layouts |= {name: Layout(meta, ()) for name, meta in each.computed.items()}
        super().__init__(named.source, layouts, named.names)
        self._computed = computed

    def read(self, key: str, box: Box, out: Tensor) -> None:
        if key in self._computed:
            out.copy_(self._computed[key][slices_of(box)].reshape(-1))
        else:
            super().read(key, box, out)


def hooked_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that have load hooks of their own, by the prefix of their names."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, _, each in named_modules(module):
        if _own_hooks(each) or overrides_load(each):
            found.setdefault(id(each), (f"{name}." if name else "", each))
    return dict(found.values())


def renaming_by(
    hooked: Mapping[str, nn.Module], named: ComposedTensors, expected: Expectation, *, fits: bool
) -> Renaming:
    """Return what hooks do to a checkpoint's tensors.

    Args:
        hooked: Of `hooked_modules`.
        named: The checkpoint's tensors.
        expected: What the model has.
        fits: Whether the checkpoint has just that already. It is then of the present version of each module, as files
            tell none, and hooks that only mend older ones leave it.

    Raises:
        CheckpointError: If a hook needs values.
    """
    marks = {
        name: torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        for name, meta in named.tensors.items()
        if any(name.startswith(prefix) for prefix in hooked)
    }
    state = _after_hooks(hooked, marks, expected, fits=fits)
    sources = {_identity(mark): name for name, mark in marks.items()}
    found = Renaming(gone=tuple(name for name in marks if name not in state))
    for name, each in state.items():
        source = sources.get(_identity(each))
        if source is None:
            found.computed[name] = TensorMeta(shape=tuple(each.shape), dtype=each.dtype)
        elif source != name:
            found.sources[name] = source
    return found


def computed_by(
    hooked: Mapping[str, nn.Module], named: ComposedTensors, expected: Expectation, renaming: Renaming, *, fits: bool
) -> dict[str, Tensor]:
    """Return the values that hooks compute, which is all that this reads; arguments are those of `renaming_by`.

    Raises:
        CheckpointError: If a hook raises, or computes from a tensor that it also leaves in its place.
    """
    if not renaming.computed:
        return {}
    used = {*renaming.gone, *renaming.computed} - {*renaming.sources.values()}
    values = {
        name: named.read_whole(name) if name in used else torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        for name, meta in named.tensors.items()
        if any(name.startswith(prefix) for prefix in hooked)
    }
    state = _after_hooks(hooked, values, expected, fits=fits)
    computed = {name: state[name].detach().contiguous() for name in renaming.computed}
    if any(each.is_meta for each in computed.values()):
        msg = f"The model's load hooks compute values from tensors that they also keep. {_REMEDY}"
        raise CheckpointError(msg)
    return computed


def _after_hooks(
    hooked: Mapping[str, nn.Module], state: Mapping[str, Tensor], expected: Expectation, *, fits: bool
) -> dict[str, Tensor]:
    """Run load hooks from the outermost module to the innermost, as torch does; return what they make of a state."""
    state = dict(state)
    for prefix, module in hooked.items():
        inside = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        metadata = {"version": getattr(module, "_version", 1)} if fits else {}
        problems: tuple[list[str], list[str], list[str]] = ([], [], [])
        try:
            if overrides_load(module):
                with _stripped(module, prefix, expected) as landed:
                    metadata["assign_to_params_buffers"] = True
                    module._load_from_state_dict(inside, prefix, metadata, True, *problems)  # noqa: FBT003, SLF001 - what torch calls
                inside |= landed
            else:
                for hook in _own_hooks(module).values():
                    hook(inside, prefix, metadata, True, *problems)  # noqa: FBT003 - as torch calls it
        except Exception as error:
            of = f"'{prefix.rstrip('.')}' (`{type(module).__name__}`)"
            msg = f"The load hooks of {of} raised {type(error).__name__}: {error}. {_REMEDY}"
            raise CheckpointError(msg) from error
        state |= {name: each for name, each in inside.items() if isinstance(each, torch.Tensor)}
    return state


@contextmanager
def _stripped(module: nn.Module, prefix: str, expected: Expectation) -> Iterator[dict[str, Tensor]]:
    """Give a module tensors without values, and its own hooks alone; yield what it was given in their places."""
    own: Any = module  # torch has no public names for these
    kept = [(held, dict(held)) for held in (own._parameters, own._buffers)]  # noqa: SLF001
    every_hook, placeholders = own._load_state_dict_pre_hooks, dict[str, Any]()  # noqa: SLF001
    landed: dict[str, Tensor] = {}
    try:
        for held, before in kept:
            for name, tensor in before.items():
                first = expected.aliases.get(prefix + name, prefix + name)
                if tensor is not None and first in expected.tensors:
                    meta = expected.tensors[first]
                    each = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
                    held[name] = nn.Parameter(each, requires_grad=False) if held is own._parameters else each  # noqa: SLF001
                    placeholders[name] = held[name]
        own._load_state_dict_pre_hooks = _own_hooks(module)  # noqa: SLF001
        yield landed
        for name, placeholder in placeholders.items():
            now = next((held[name] for held, _ in kept if name in held), None)
            if now is not None and now is not placeholder:
                landed[prefix + name] = now
    finally:
        own._load_state_dict_pre_hooks = every_hook  # noqa: SLF001
        for held, before in kept:
            held.clear()
            held.update(before)


def _own_hooks(module: nn.Module) -> dict[int, Any]:
    hooks: Mapping[int, Any] = module._load_state_dict_pre_hooks  # noqa: SLF001 - torch lists them nowhere else
    return {key: hook for key, hook in hooks.items() if not _is_of_strategies(hook)}


def _is_of_strategies(hook: Any) -> bool:
    while (inner := getattr(hook, "hook", None)) or isinstance(hook, functools.partial):
        hook = inner or hook.func
    where = getattr(inspect.unwrap(hook), "__module__", None) or type(hook).__module__
    return where.startswith(("torch.distributed.", "booster_"))


def _identity(tensor: Tensor) -> object:
    """Return what a tensor shares with one that is made a parameter, and with no other."""
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()  # noqa: SLF001
