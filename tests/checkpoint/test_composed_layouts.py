"""Layouts say of which boxes a tensor is made, and read any box of it as torch's operations would make it."""

import itertools

import pytest
import torch

from booster_checkpoint.files import composed
from booster_checkpoint.files.composed import ComposedTensors, Layout, concatenate, stack
from booster_core.state import TensorMeta, slices_of


class Stored:
    """Tensors in memory, read by boxes like those of a file."""

    values = ()

    def __init__(self, tensors):
        self.stored = tensors

    def layout(self, key):
        return Layout.of(key, TensorMeta(shape=tuple(self.stored[key].shape), dtype=self.stored[key].dtype))

    def read(self, key, box, out):
        out.copy_(self.stored[key][slices_of(box)].reshape(-1))


def made_of(operations):
    """Return what operations make of two tensors, and the layout of that."""
    stored = Stored({name: torch.randn(4, 6, 2) for name in ("a", "b")})
    (value, other), (layout, more) = stored.stored.values(), map(stored.layout, stored.stored)
    for name, *args in operations:
        if name == "stack":
            value, layout = torch.stack([value, other], *args), stack([layout, more], *args)
        elif name == "concatenate":
            value, layout = torch.cat([value, other], *args), concatenate([layout, more], *args)
        elif name == "cut":
            dim, start, stop = args
            value, layout = value.narrow(dim, start, stop - start), layout.cut(*args)
        else:
            value, layout = getattr(value, name)(*args), getattr(layout, name)(*args)
    return value, layout, stored


CHAINS = [
    [("transpose", 0, 1)],
    [("transpose", 0, 2), ("transpose", 1, 2)],
    [("stack", 0), ("transpose", 1, 2)],
    [("stack", 1), ("transpose", 0, 3), ("select", 2, 4)],
    [("concatenate", 1), ("transpose", 1, 2), ("cut", 2, 3, 9)],
    [("select", 0, 3), ("transpose", 0, 1), ("cut", 1, 1, 5)],
    [("transpose", 1, 2), ("cut", 1, 1, 2), ("transpose", 0, 1)],
]


@pytest.mark.parametrize("part_bytes", [16 << 20, 16])
@pytest.mark.parametrize("operations", CHAINS, ids=lambda chain: "-".join(name for name, *_ in chain))
def test_any_box_of_a_layout_is_that_of_the_tensor(operations, part_bytes, monkeypatch):
    monkeypatch.setattr(composed, "_PART_BYTES", part_bytes)
    value, layout, stored = made_of(operations)
    assert layout.meta.shape == tuple(value.shape)
    tensors = ComposedTensors(stored, {"made": layout})
    for box in itertools.product(*[((0, size), (size // 2, size), (0, 1)) for size in value.shape]):
        expected = value[slices_of(box)]
        out = torch.empty(expected.numel())
        tensors.read("made", box, out)
        assert torch.equal(out.view(expected.shape), expected)


def test_a_transposed_tensor_is_not_the_stored_one():
    stored = Stored({"a": torch.randn(4, 4)})
    assert stored.layout("a").single == "a"
    assert stored.layout("a").transpose(0, 1).single is None
    assert stored.layout("a").transpose(0, 1).transpose(0, 1).single == "a"
