"""Modules whose parameters are gathered as one, because each batch chooses which of them it uses.

Ranks gather chunks together, so that all have to use the same ones in the same order. Experts are chosen by the data,
differently on every rank. A *leaf* gathers the chunks of all its parameters when its forward begins and when its
backward begins, and keeps them until that has ended; what happens inside of it makes no difference to other ranks. (The
idea is that of DeepSpeed's ``set_z3_leaf_modules``.)
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_gemini.chunk.manager import ChunkManager
    from booster_zero.engine import Bucket


def find_leaves(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> dict[nn.Module, list[nn.Module]]:
    """Return the leaves of a model, each below the module in whose forward it is gathered.

    That is the leaf itself, or for a list of modules, which has no forward, the nearest module above that has one.

    Args:
        model: The user's model.
        wanted: Classes, names of classes, and paths of modules.

    Raises:
        ConfigError: If an entry fits no module, or only lists that are above everything that has a forward.

    Collective: none.
    """
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for each in wanted:
        fitting = {path: module for path, module in modules.items() if _fits(path, module, each)}
        if not fitting:
            classes = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
            msg = (
                f"`leaf_modules` lists {_told(each)}, and the model has no such module. Pass classes, names of classes "
                f"or paths of modules, as `named_modules()` gives them. The model's classes: {classes}."
            )
            raise ConfigError(msg)
        found.update(fitting)
    hosts: dict[nn.Module, list[nn.Module]] = {}
    for path, module in found.items():
        if any(path.startswith(f"{other}.") or (path and not other) for other in found):
            continue  # a part of a larger leaf
        hosts.setdefault(_host(modules, path), []).append(module)
    return hosts


def _fits(path: str, module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if isinstance(wanted, str):
        return wanted in (path, type(module).__name__)
    return isinstance(module, wanted)


def _host(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    place = path
    while type(modules[place]).forward is nn.Module.forward:
        if not place:
            msg = f"`leaf_modules` lists '{path}', and neither that nor a module above it has a forward."
            raise ConfigError(msg)
        place = place.rpartition(".")[0]
    return modules[place]


def _told(wanted: str | type[nn.Module]) -> str:
    return repr(wanted) if isinstance(wanted, str) else f"the class `{wanted.__name__}`"


class LeafUse:
    """Keeps the chunks of one leaf gathered during its backward.

    Args:
        manager: The chunks.
        indices: The parameters of the leaf, by number, in the order in which they are gathered.
    """

    def __init__(self, manager: ChunkManager, indices: Sequence[int]) -> None:
        self._manager = manager
        self.indices = list(indices)

    def chunks(self) -> list[Bucket]:
        """Return the leaf's chunks as they are laid out now."""
        return list(dict.fromkeys(self._manager.chunk_of(index) for index in self.indices))

    def expect_backward(self, inputs: Any, outputs: Any) -> None:
        """Gather the chunks once backward has reached an output, until it has left by all inputs.

        Where no input requires a gradient, they stay until the end of backward.

        Args:
            inputs: What forward was called with.
            outputs: What it returned.

        Collective: none; backward is, in the shard group.
        """
        before, after = _differentiated(inputs), _differentiated(outputs)
        if not after:
            return
        holder = object()  # of this use: what goes out of one may go into the next
        # Not all outputs: one that is used inside, too, has its gradient after others.
        register_multi_grad_hook(after, lambda _: self._manager.hold(holder, self.chunks()), mode="any")
        if before:
            register_multi_grad_hook(before, lambda _: self._manager.let_go(holder))


def _differentiated(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require gradients."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                found.append(each)
        elif is_dataclass(each) and not isinstance(each, type):
            found += _differentiated([getattr(each, field.name) for field in fields(each)])
    return found
