"""The mesh of a hybrid run: the order of its axes, the groups of ranks that communicate, and who is where in them.

An order lists the axes from the outermost to the innermost. Ranks of the innermost axis are neighbours, so that what
communicates most, the tensor axis by default, stays within a host; every order computes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_hybrid.axes import MeshShape, fill_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AXES = ("dp", "pp", "sp", "tp")
"""The axes, in the order that they have where none is asked for."""
COMMUNICATING = [("tp",), ("dp",), ("pp",), ("sp",), ("dp", "sp"), ("pp", "sp", "tp"), ()]
"""The sets of axes along which something is communicated: each is one group of ranks for whoever is in it.

Gradients are reduced over ``("dp", "sp")``; the ranks of ``("pp", "sp", "tp")`` work on the same batch.
"""


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return an order of the axes.

    Raises:
        ConfigError: If it does not name each of them once.

    Collective: none.
    """
    if isinstance(order, str) or sorted(map(str, order)) != sorted(AXES):
        listed = repr(order) if isinstance(order, str) else f"({', '.join(map(repr, order))})"
        msg = (
            f"`mesh_order={listed}` must name each of {', '.join(map(repr, AXES))} once, from the outermost axis to "
            "the innermost, whose ranks are neighbours."
        )
        raise ConfigError(msg)
    return tuple(order)


def mesh_shape(sizes: Mapping[str, int], order: Sequence[str], world_size: int) -> MeshShape:
    """Return the mesh, in which data parallelism takes what the other axes leave of the world.

    Args:
        sizes: Size of each axis but ``"dp"``.
        order: All axes, the outermost first.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the sizes' product does not divide the number of ranks.

    Collective: none.
    """
    return fill_axis({name: sizes.get(name, 1) for name in order}, "dp", world_size)
