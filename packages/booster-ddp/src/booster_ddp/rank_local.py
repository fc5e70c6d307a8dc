"""Parameters and buffers that a model keeps out of DDP.

A model lists them by ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``, as torchrec does for
embedding tables that it shards itself. They are neither broadcast nor averaged, and may differ between ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_core.state import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True, kw_only=True)
class RankLocal:
    """The tensors of a model that DDP leaves alone.

    Args:
        names: Their names in the user's model.
        paths: Their names under ``torch.compile`` and other wrappers, as DDP compares them.
        ids: The ``id`` of each tensor.
    """

    names: frozenset[str]
    paths: frozenset[str]
    ids: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module) -> RankLocal:
        """Return the tensors that a model asks DDP to ignore.

        A tied parameter is ignored if all of its names are listed.

        Raises:
            ConfigError: If a listed name is that of no parameter or buffer.
        """
        listed = {name.removeprefix(".") for name in getattr(model, _ATTRIBUTE, ())}
        if not listed:
            return cls(names=frozenset(), paths=frozenset(), ids=frozenset())
        ignored: dict[int, list[tuple[str, str]]] = {}
        unknown, shared = set(listed), set()
        for name, path, tensor in _named_tensors(model):
            if listed.isdisjoint((name, path)):
                shared.add(id(tensor))
            else:
                unknown -= {name, path}
                ignored.setdefault(id(tensor), []).append((name, path))
        if unknown:
            msg = (
                f"The model lists names for DDP to ignore (`{_ATTRIBUTE}`) that are none of its parameters or buffers: "
                f"{', '.join(map(repr, sorted(unknown)[:10]))}. Use the names of `named_parameters` or `named_buffers`."
            )
            raise ConfigError(msg)
        kept = [pair for key, pairs in ignored.items() if key not in shared for pair in pairs]
        return cls(
            names=frozenset(name for name, _ in kept),
            paths=frozenset(path for _, path in kept),
            ids=frozenset(ignored.keys() - shared),
        )

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.ids

    @contextlib.contextmanager
    def known_to_ddp(self, model: nn.Module) -> Iterator[None]:
        """Let a `DistributedDataParallel` that is constructed inside this context ignore these tensors."""
        if not self.ids:
            yield
            return
        # In the module's own `__dict__`: `torch.compile`'s module passes attributes on to the user's model. DDP's
        # reducer puts a dot before the name of a parameter that no submodule holds.
        attributes = vars(model)
        before = attributes.get(_ATTRIBUTE)
        attributes[_ATTRIBUTE] = [*self.paths, *(f".{path}" for path in self.paths if "." not in path)]
        try:
            yield
        finally:
            if before is None:
                del attributes[_ATTRIBUTE]
            else:
                attributes[_ATTRIBUTE] = before


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each parameter and buffer with its name in the user's model and its name under wrappers."""
    for name, path, module in named_modules(model):
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 - to list repeated ones as well
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield f"{name}.{key}".removeprefix("."), f"{path}.{key}".removeprefix("."), tensor
