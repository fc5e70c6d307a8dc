"""Index arithmetic: any partition written by one layout and read by another gives the tensor back."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_core.state import (
    TensorShard,
    as_bytes,
    copy_part,
    intersect,
    is_contiguous,
    pack,
    regions_of,
    runs_of,
    slices_of,
    span_of,
    unpack,
)
from booster_core.state.shard import box_numel, box_shape, full_box

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return tuple(box)


@st.composite
def partitions(draw, shape):
    """A list of (box, flat) that covers the tensor once: boxes split along random dims, then in flat ranges."""
    done, todo = [], [full_box(shape)]
    while todo:
        box = todo.pop()
        dims = [d for d, (a, b) in enumerate(box) if b - a > 1]
        if dims and len(done) + len(todo) < 6 and draw(st.booleans()):
            dim = draw(st.sampled_from(dims))
            a, b = box[dim]
            cut = draw(st.integers(a + 1, b - 1))
            todo += [(*box[:dim], (a, cut), *box[dim + 1 :]), (*box[:dim], (cut, b), *box[dim + 1 :])]
        else:
            done.append(box)
    parts = []
    for box in done:
        numel = box_numel(box)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        if len(cuts) < 2 or draw(st.booleans()):
            parts.append((box, None))
        else:
            parts += [(box, (a, b)) for a, b in itertools.pairwise(cuts)]
    return parts


def flat_indices(shape, box):
    """Return the places of a box' elements in the row-major flattened tensor, counted one by one."""
    everything = itertools.product(*map(range, shape))
    return [
        place
        for place, index in enumerate(everything)
        if all(start <= each < stop for each, (start, stop) in zip(index, box, strict=True))
    ]


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 3), (2, 1, 3, 2)], ids=str)
def test_every_flat_range_of_a_box_is_cut_into_its_boxes(shape):
    larger = tuple(size + 2 for size in shape)
    box = tuple((1, size + 1) for size in shape)
    places = flat_indices(larger, box)
    for start, stop in itertools.combinations_with_replacement(range(len(places) + 1), 2):
        regions = regions_of(box, (start, stop))
        assert [place for region in regions for place in flat_indices(larger, region.box)] == places[start:stop]
        assert [region.start for region in regions] == list(
            itertools.accumulate((region.numel for region in regions[:-1]), initial=0)
        )[: len(regions)]
        assert all(region.numel > 0 for region in regions)
        assert len(regions) <= 2 * len(shape) - 1


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 2), (0, 2), (2, 0)], ids=str)
def test_span_and_runs_name_the_elements_of_every_box(shape):
    for box in itertools.product(*(itertools.combinations_with_replacement(range(size + 1), 2) for size in shape)):
        indices = flat_indices(shape, box)
        if not indices:
            assert span_of(shape, box) == (0, 0)
            continue
        assert span_of(shape, box) == (indices[0], indices[-1] + 1)
        assert is_contiguous(shape, box) == (indices == list(range(indices[0], indices[-1] + 1)))
        starts, length = runs_of(shape, box)
        starts = list(starts)
        assert [s + i for s in starts for i in range(length)] == indices
        assert all(a + length < b for a, b in itertools.pairwise(starts)), "touching runs are joined"


@given(st.data())
def test_written_by_one_partition_and_read_by_another_equals_the_tensor(data):
    shape = data.draw(shapes)
    tensor = torch.randn(shape, dtype=torch.float64)
    stored = torch.full(shape, math.nan, dtype=torch.float64)
    for box, flat in data.draw(partitions(shape)):
        local = tensor[slices_of(box)].reshape(-1)
        local = local if flat is None else local[flat[0] : flat[1]]
        for region in regions_of(box, flat):
            values = local[region.start : region.start + region.numel]
            stored[slices_of(region.box)] = values.view(box_shape(region.box))
    assert torch.equal(stored, tensor)
    for box, flat in data.draw(partitions(shape)):
        expected = tensor[slices_of(box)].reshape(-1)
        expected = expected if flat is None else expected[flat[0] : flat[1]]
        got = torch.empty_like(expected)
        for region in regions_of(box, flat):
            got[region.start : region.start + region.numel] = stored[slices_of(region.box)].reshape(-1)
        assert torch.equal(got, expected)


@given(st.data())
def test_pack_and_unpack_follow_the_row_major_order_of_any_strides(data):
    shape = data.draw(shapes)
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    assert tuple(tensor.shape) == shape
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    out = torch.empty(stop - start)
    pack(tensor, start, stop, out)
    assert torch.equal(out, tensor.reshape(-1)[start:stop])
    copy = torch.zeros_like(tensor)
    unpack(out, copy, start, stop)
    assert torch.equal(copy.reshape(-1)[start:stop], out)
    assert copy.count_nonzero() == out.count_nonzero()


@given(st.data())
def test_intersection_holds_the_common_elements(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    common = set(whole[slices_of(a)].reshape(-1).tolist()) & set(whole[slices_of(b)].reshape(-1).tolist())
    box = intersect(a, b)
    got = set() if box is None else set(whole[slices_of(box)].reshape(-1).tolist())
    assert got == common
    assert (box is None) == (not common)


@given(st.data())
def test_relative_slices_find_a_box_within_another(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    outer = data.draw(boxes(shape))
    within = data.draw(boxes(box_shape(outer)))
    inner = tuple((start + low, start + high) for (start, _), (low, high) in zip(outer, within, strict=True))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    assert torch.equal(whole[slices_of(outer)][slices_of(inner, outer)], whole[slices_of(inner)])


@pytest.mark.parametrize("function", [slices_of, intersect, lambda a, b: span_of(box_shape(a), b)])
def test_boxes_of_tensors_with_other_dimensions_are_refused(function):
    with pytest.raises(ValueError, match="shorter"):
        function(((0, 2), (0, 3)), ((0, 2),))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_bytes_are_the_tensor_s_own_memory(shape, dtype):
    tensor = torch.arange(1, math.prod(shape) + 1).to(dtype).reshape(shape)
    memory = as_bytes(tensor)
    assert bytes(memory) == bytes(tensor.untyped_storage())
    memory[:] = bytes(len(memory))
    assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
def test_one_element_has_bytes_whatever_its_strides_are(dtype):
    tensor = torch.zeros((), dtype=dtype).expand(1, 1)
    as_bytes(tensor)[:] = bytes(range(1, 1 + tensor.itemsize))
    assert bytes(as_bytes(tensor)) == bytes(tensor.untyped_storage())


@pytest.mark.parametrize(("options", "expected"), [({}, False), ({"non_blocking": True}, True)])
@pytest.mark.parametrize(("strides", "num_copies"), [((2, 1), 1), ((1, 3), 3)])
def test_pack_waits_for_its_copies_unless_told_not_to(options, expected, strides, num_copies):
    data = torch.arange(6.0).as_strided((3, 2), strides)
    packed, real, found = torch.empty(4), torch.Tensor.copy_, []

    def copy(self, source, *, non_blocking):
        found.append(non_blocking)
        return real(self, source, non_blocking=non_blocking)

    with mock.patch.object(torch.Tensor, "copy_", copy):
        pack(data, 1, 5, packed, **options)
    assert found == [expected] * num_copies
    assert packed.tolist() == data.flatten()[1:5].tolist()


@pytest.mark.parametrize("strides", [(4, 1), (1, 3)])
@pytest.mark.parametrize(("flat", "expected"), [(None, [5, 6, 9, 10]), ((1, 3), [6, 9])])
def test_a_shard_s_part_is_copied_from_a_whole_tensor(strides, flat, expected):
    values = torch.empty_strided((3, 4), strides, dtype=torch.float64)
    values.copy_(torch.arange(12.0).view(3, 4))
    data = torch.full((2, 2) if flat is None else (2,), -1.0, requires_grad=True)
    box = ((1, 3), (1, 3))
    copy_part(values, TensorShard(name="w", global_shape=(3, 4), dtype=data.dtype, box=box, flat=flat, data=data))
    assert data.flatten().tolist() == expected
