"""Entries for small modules of our own that take a batch ``x`` of shape ``(samples, 8)``."""

from model_zoo.fields import batch_of, normal
from model_zoo.registry import ZooModel

WIDTH = 8


def own(name, build, **more):
    """Return the entry of a module; a batch of normally distributed ``x`` unless another is given."""
    return ZooModel(name=f"own/{name}", build=build, **{"batch": batch_of(x=normal(WIDTH)), **more})
