"""States by the names of the user's model, for scripts that save and load ``model.module`` as under plain DDP.

There ``module`` is the user's model; here it is the ``DistributedDataParallel``, on which hooks can be registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    _ModuleT = TypeVar("_ModuleT", bound=nn.Module)

_PREFIX = "module."


def with_users_names(wrapper: _ModuleT) -> _ModuleT:
    """Let ``state_dict`` and ``load_state_dict`` of a wrapper have the names of the model in its ``module``."""
    wrapper.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
    return wrapper


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del module, metadata
    _rename(state, f"{prefix}{_PREFIX}", prefix)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    del module
    _rename(state, prefix, f"{prefix}{_PREFIX}")


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Change what names begin with, in place and in their order."""
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: state[name] for name in state}
    state.clear()
    state.update(renamed)
