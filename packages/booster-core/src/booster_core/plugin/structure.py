"""Notice that a script has given a boosted model other parameters, which no optimizer and no strategy knows of.

Torch tells of every parameter and module that is registered. Where a boosted model's module gets one, its next forward
looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as torch_module

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_MARK = "_is_boosted"
_registered = 0


def _count(module: nn.Module, *_: object) -> None:
    # Also traced by the compiler, for containers that a forward makes: those must not touch the number.
    if _MARK in module.__dict__:
        global _registered  # noqa: PLW0603 - torch's hooks are global, too
        _registered += 1


torch_module.register_module_parameter_registration_hook(_count)
torch_module.register_module_module_registration_hook(_count)


class Structure:
    """The parameters that a model had at `boost`.

    Args:
        model: The user's model, as the strategy has laid it out.
        are_replaced: The strategy puts other objects in the place of parameters, of the same names and shapes, in the
            same modules.
    """

    def __init__(self, model: nn.Module, *, are_replaced: bool) -> None:
        self._model, self._are_replaced = model, are_replaced
        for module in model.modules():
            module.__dict__[_MARK] = True
        self._known, self._seen = self._parameters(), _registered

    def check(self) -> None:
        """Check that the model has the same parameters still.

        Raises:
            ConfigError: If it has not.
        """
        if self._seen == _registered:
            return
        before, now = self._known, self._parameters()
        self._seen = _registered
        others = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if others:
            self._seen = -1  # raise in each forward
            was, new = ({name: shape for name, (shape, _) in known.items()} for known in (before, now))
            described = ", ".join(f"'{name}' ({was.get(name)} -> {new.get(name)})" for name in others[:5])
            msg = (
                f"{len(others)} parameter(s) of the model are others than at `boost`: {described}. Neither the "
                "strategy nor the optimizer knows of them. Change the model before `boost`, as by "
                "`resize_token_embeddings`, `tie_weights`, `add_adapter`, `merge_and_unload` or another head; later, "
                "save it, change the loaded one and boost that."
            )
            raise ConfigError(msg)

    def __reduce__(self) -> Any:
        # A copy of the model is not boosted.
        return type(None), ()

    def _parameters(self) -> dict[str, tuple[tuple[int, ...], int]]:
        named = self._model.named_parameters()
        return {name: (tuple(each.shape), self._identity(name, each)) for name, each in named}

    def _identity(self, name: str, parameter: nn.Parameter) -> int:
        if not self._are_replaced:
            return id(parameter)
        return _MARK in self._model.get_submodule(name.rpartition(".")[0]).__dict__
