"""Which parameters are gathered together: those of a layer, and those outside of the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_runtime.sharding import layers_of, parameters_by_unit, without_split_ties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


@dataclass(frozen=True)
class Units:
    """What is gathered together.

    Args:
        layers: The parameters of each layer, gathered with its forward and its backward.
        rest: The other parameters, gathered during the forward of the whole model.
        order: All parameters by number, in the lists that share no chunk with each other; what is used first comes
            first, so that it is reduced last.
    """

    layers: Mapping[nn.Module, list[nn.Parameter]] = field(repr=False)
    rest: list[nn.Parameter] = field(repr=False)
    order: list[list[int]] = field(repr=False)


def find_units(model: nn.Module, copies: Mapping[int, tuple[int, ...]]) -> Units:
    """Return the units of a model, of which this rank may hold some layers.

    Args:
        model: The user's model.
        copies: For parameters that several stages of a pipeline hold, by ``id``, which ones they are. All stages lay
            these out in the same way.
    """
    chosen = layers_of(model)
    kept = without_split_ties(model, {id(module) for module in chosen.values()})
    names = [name for name, module in chosen.items() if id(module) in kept]
    by_unit = parameters_by_unit(model, names)
    index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}

    def numbers(parameters: list[nn.Parameter]) -> list[int]:
        return [index_of[id(parameter)] for parameter in parameters if id(parameter) not in copies]

    shared = [
        [index for key, index in index_of.items() if copies.get(key) == stages] for stages in sorted({*copies.values()})
    ]
    order = [*shared, numbers(by_unit[""]), *(numbers(by_unit[name]) for name in names)]
    return Units(
        layers={chosen[name]: by_unit[name] for name in names},
        rest=by_unit[""],
        order=[unit for unit in order if unit],
    )
