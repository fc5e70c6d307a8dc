"""The leaves of nested containers, with their paths."""

from torch.utils import _pytree as pytree

from booster_runtime.data import leaves_by_path


class Pair:
    def __init__(self, first, second):
        self.parts = [first, second]


# As diffusers registers its outputs: without names for the parts.
pytree._private_register_pytree_node(Pair, lambda pair: (pair.parts, None), lambda parts, _: Pair(*parts))


def test_leaves_have_their_paths():
    leaves, form = leaves_by_path({"a": [1, 2], "b": (3,)})
    assert leaves == [("['a'][0]", 1), ("['a'][1]", 2), ("['b'][0]", 3)]
    assert pytree.tree_unflatten([leaf for _, leaf in leaves], form) == {"a": [1, 2], "b": (3,)}


def test_leaves_of_a_class_without_names_for_its_parts_are_numbered():
    leaves, form = leaves_by_path({"a": Pair(1, [2, 3])})
    assert leaves == [("[0]", 1), ("[1]", 2), ("[2]", 3)]
    assert pytree.tree_unflatten([4, 5, 6], form)["a"].parts == [4, [5, 6]]
