"""`ModulePatches`: what is replaced in a user's modules so that they compute on a part, and how all of it is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

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
