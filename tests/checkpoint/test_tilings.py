"""Whether boxes fill a tensor, compared with counting how often each element is in one."""

import itertools
import math
import random

import numpy as np
import pytest

from booster_checkpoint.files.parts import is_tiling
from booster_core.state import regions_of


def counted(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[tuple(slice(*each) for each in box)] += 1
    return bool((counts == 1).all())


def cut(shape, draw):
    """Cut a tensor into boxes, each into two a few times."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw.randrange(6)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randint(*box[dim])
        boxes += [(*box[:dim], (box[dim][0], at), *box[dim + 1 :]), (*box[:dim], (at, box[dim][1]), *box[dim + 1 :])]
    return boxes


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_random_boxes(dims):
    draw = random.Random(dims)
    answers = []
    for _ in range(600):
        shape = tuple(draw.randint(1, 4) for _ in range(dims))
        boxes = cut(shape, draw)
        for _ in range(draw.randrange(3)):  # spoiled, often with as many elements as before
            place = draw.randrange(len(boxes))
            boxes[place] = (
                draw.choice(boxes)
                if draw.random() < 0.5
                else tuple(tuple(sorted(draw.choices(range(size + 1), k=2))) for size in shape)
            )
        answers.append(is_tiling(shape, boxes))
        assert answers[-1] == counted(shape, boxes), (shape, boxes)
    assert 100 < sum(answers) < 500


def test_equal_boxes_that_have_as_many_elements_as_the_tensor():
    assert not is_tiling((3, 2), [((0, 1), (0, 2))] * 3)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2,) * 12, (3, 4, 5)])
def test_flat_ranges_of_ranks(shape):
    numel = math.prod(shape)
    edges = sorted({0, numel, numel // 3, numel // 2 + 1})
    whole = tuple((0, size) for size in shape)
    boxes = [region.box for flat in itertools.pairwise(edges) for region in regions_of(whole, flat)]
    assert is_tiling(shape, boxes)
    assert not is_tiling(shape, boxes[1:])


def test_what_has_no_elements_or_no_dimensions():
    assert is_tiling((), [()])
    assert not is_tiling((), [(), ()])
    assert is_tiling((0, 3), [])
    assert is_tiling((0, 3), [((0, 0), (0, 3))])
    assert not is_tiling((2,), [])
