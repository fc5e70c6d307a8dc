"""A user's modules: what is replaced in them for a part of the work, and the names that rules know them by.

`ModulePatches` undoes what it has replaced. Names are those that modules have without adapters: peft puts its own
layers around those that it adapts, and copies next to those that are trained whole (``modules_to_save``). A rule means
the layer inside, and each of its copies.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from booster_core.state import compiled_module, named_modules, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle


_ABSENT = object()


class ModulePatches:
    """Forwards, attributes and hooks that were replaced in a model; `undo` puts all of them back.

    What modules keep in other objects, such as state behind closures, is not known here.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Replace a module's forward."""
        self.entry(vars(module), "forward", function)

    def attribute(self, owner: object, name: str, value: object) -> None:
        """Replace a plain attribute of an object."""
        self.entry(vars(owner), name, value)

    def entry(self, mapping: MutableMapping[Any, Any], key: object, value: object) -> None:
        """Replace an entry of a dictionary, which keeps its order."""
        before = mapping.get(key, _ABSENT)

        def put_back() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before

        self._undo.append(put_back)
        mapping[key] = value

    def hook(self, handle: RemovableHandle) -> None:
        """Note a hook that was registered."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put back what was there before, the last change first."""
        while self._undo:
            self._undo.pop()()


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of its compiler and adapters: its class has a policy, and names in it are the user's.

    Its layers have their adapters all the same: peft puts them there in place.

    Args:
        model: The user's model.
    """
    return without_adapters(compiled_module(model) or model)


class ModuleNames:
    """A model's modules and parameters by the user's names.

    Args:
        model: The user's model, without what is around the whole of it.

    Attributes:
        modules: Each module under its name, those of adapters left out; of several around each other the innermost.
        outermost: The same, but the outermost.
        parameters: The parameters of these modules.
        names_of: The names of each parameter of the model, adapters' included, by ``id``.
        adapted: peft's layers around some of these modules, by name; the outermost of several.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.outermost: dict[str, nn.Module] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.names_of: dict[int, list[str]] = defaultdict(list)
        self.adapted: dict[str, Any] = {}
        self._stands_for: dict[str, str] = {}
        layers, copies = peft_classes()
        adapters: set[str] = set()
        module: Any
        for name, _, module in named_modules(model):
            if isinstance(module, layers):
                self.adapted.setdefault(name, module)
                adapters |= {f"{name}.{child}" for child in module._modules if child != "base_layer"}  # noqa: SLF001
            if isinstance(module, copies):
                for adapter in module.modules_to_save:
                    self._stands_for[f"{name}.modules_to_save.{adapter}"] = name
            is_adapters = not adapters.isdisjoint(prefixes(name))
            if not is_adapters:
                self.modules[name] = module
                self.outermost.setdefault(name, module)
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                own = f"{name}.{attribute}" if name else attribute
                self.names_of[id(parameter)].append(own)
                if not is_adapters:
                    self.parameters[own] = parameter

    def in_rules(self, name: str) -> str:
        """Return what rules call a module or parameter: a copy is called as what it stands for."""
        for prefix in reversed([*prefixes(name)]):
            if prefix in self._stands_for:
                return self.in_rules(self._stands_for[prefix] + name[len(prefix) :])
        return name

    def parent(self, name: str) -> nn.Module:
        """Return the module whose forward calls the one of a name, or what that stands for."""
        return self.modules[self._stands_for.get(name, name).rpartition(".")[0]]


def prefixes(name: str) -> Iterator[str]:
    """Yield a module's name and those of the modules around it, the outermost last."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def peft_classes() -> tuple[Any, Any]:
    """Return peft's classes of layers with adapters, and of what holds copies; none where nobody has used peft."""
    if "peft" not in sys.modules:
        return (), ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    return (BaseTunerLayer,), (ModulesToSaveWrapper,)
