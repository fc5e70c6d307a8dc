"""Find parameters that forward writes to while they are gathered: FSDP drops such values with the gathered copies.

Version counters tell of operations in place at no cost. What goes through ``.data`` leaves no trace there, so during
the first forwards of each unit some elements of its parameters are compared as well.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

_COMPARED_FORWARDS = 4
"""A model that writes to its parameters in forward does so each time; accumulation and evaluation may come first."""
_SAMPLES = 256


class ForwardWrites:
    """Compares the gathered parameters of units before and after their forward.

    Args:
        modules: The modules of the units.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._excepted = _parametrized_in_forward(modules)
        self._forwards_left: dict[int, int] = {}
        self._samples: dict[int, Tensor] = {}  # of gathered parameters, by the ids of torch's objects for them

    def take(self, group: Any) -> None:
        """Remember a unit's gathered parameters before its forward."""
        left = self._forwards_left.setdefault(id(group), _COMPARED_FORWARDS)
        if not left or torch.compiler.is_compiling():
            return
        self._forwards_left[id(group)] = left - 1
        for inner, whole in self._gathered(group):
            self._samples[id(inner)] = _samples(whole)

    def check(self, group: Any) -> None:
        """Compare a unit's gathered parameters after its forward.

        Raises:
            ConfigError: If forward has written to one of them.
        """
        for inner, whole in self._gathered(group):
            before = self._samples.pop(id(inner), None) if self._samples else None
            # torch's gathers leave the version counters at zero.
            if whole._version:  # noqa: SLF001 - as autograd notices it
                raise _written(inner, "in place")
            if before is not None and not torch.equal(before, _samples(whole)):
                raise _written(inner, "through `.data`")

    def _gathered(self, group: Any) -> Iterator[tuple[Any, Tensor]]:
        for inner in group.fsdp_params:
            whole = getattr(inner, "_unsharded_param", None)
            if whole is None or whole.is_inference() or id(inner._module_info.module) in self._excepted:  # noqa: SLF001
                continue
            yield inner, whole


def _samples(whole: Tensor) -> Tensor:
    """Return the bytes of some elements, which compare equal for NaN too."""
    with torch.no_grad():
        flat = whole.detach().reshape(-1)
        return flat[:: max(flat.numel() // _SAMPLES, 1)].clone().view(torch.uint8)


def _written(inner: Any, how: str) -> ConfigError:
    return ConfigError(
        f"Parameter '{inner._param_fqn}' was changed {how} during forward. FSDP drops that change, because "  # noqa: SLF001
        "it keeps only shards. Change parameters after `optimizer.step()`, or keep the module whole by "
        "`ignored_modules`."
    )


def _parametrized_in_forward(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of modules whose parameters peft parametrizes while forward runs (its ``target_parameters``).

    torch sets such a parameter to its own memory, which counts as a write.
    """
    if "peft" not in sys.modules:
        return set()
    from peft.tuners.lora.layer import ParamWrapper

    inside = (module for unit in modules for module in unit.modules())
    return {id(module.get_base_layer()) for module in inside if isinstance(module, ParamWrapper)}
