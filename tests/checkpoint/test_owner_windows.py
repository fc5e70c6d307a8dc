"""Files cut into windows, and what each rank has of a window: every value of a file arrives once, in its place."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster_checkpoint.files.tensor_file import TensorSpec
from booster_checkpoint.save.owners import _Piece, _shares, _windows
from booster_checkpoint.save.plan import PlannedFile
from booster_core.state import box_numel, full_box, slices_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]
WINDOWS = st.sampled_from([16, 32, 48, 160, 4096])


@st.composite
def files(draw):
    """Some files of tensors, in any order: the narrow ones may come first, as in `torch.save` files."""
    made = []
    for index in range(draw(st.integers(0, 3))):
        specs = []
        for number in range(draw(st.integers(0, 3))):
            shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
            specs.append(TensorSpec(key=f"t{number}", shape=shape, dtype=draw(st.sampled_from(DTYPES))))
        made.append((3 * index + 1, PlannedFile(name=f"f{index}", suffix=".safetensors", specs=tuple(specs))))
    return made


@given(files(), WINDOWS)
def test_windows_hold_every_value_once_in_the_order_of_the_files(files, window_bytes):
    windows = list(_windows(files, window_bytes))
    expected = [
        (index, spec.key, element)
        for index, file in files
        for spec in file.specs
        for element in range(math.prod(spec.shape))
    ]
    assert [
        (cut.file, cut.spec.key, element)
        for window in windows
        for cut in window
        for element in range(cut.start, cut.stop)
    ] == expected
    for window in windows:
        assert len({cut.file for cut in window}) == 1, "no window spans two files"
        position = 0
        for cut in window:
            assert cut.begin == aligned(position, cut), "values follow each other"
            assert cut.start < cut.stop
            position = end_of(cut)
        assert position <= window_bytes
    for window, following in itertools.pairwise(windows):
        if window[0].file == following[0].file:
            room = window_bytes - aligned(end_of(window[-1]), following[0])
            assert room < following[0].spec.dtype.itemsize, "a window is as full as can be"


def end_of(cut):
    return cut.begin + (cut.stop - cut.start) * cut.spec.dtype.itemsize


def aligned(position, cut):
    return math.ceil(position / cut.spec.dtype.itemsize) * cut.spec.dtype.itemsize


def pieces_of(spec, draw, num_ranks):
    """Deal the parts of a tensor to ranks: boxes along one dimension, some in flat ranges."""
    whole = torch.arange(math.prod(spec.shape)).remainder(251).to(spec.dtype).reshape(spec.shape)
    boxes = [full_box(spec.shape)]
    dims = [dim for dim, size in enumerate(spec.shape) if size > 1]
    if dims:
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, spec.shape[dim] - 1))
        (box,) = boxes
        boxes = [(*box[:dim], span, *box[dim + 1 :]) for span in ((0, cut), (cut, spec.shape[dim]))]
    held = []
    for box in boxes:
        numel, values = box_numel(box), whole[slices_of(box)]
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=2))})
        for low, high in itertools.pairwise(cuts):
            part = values if (low, high) == (0, numel) else values.reshape(-1)[low:high]
            held.append((draw(st.integers(0, num_ranks - 1)), _Piece(box, (low, high), part)))
    return whole, held


@settings(max_examples=60)
@given(files(), WINDOWS, st.data())
def test_what_ranks_send_fills_each_window_with_the_tensors_values(files, window_bytes, data):
    num_ranks = 2
    held = [{} for _ in range(num_ranks)]
    expected = {}
    for index, file in files:
        for spec in file.specs:
            whole, pieces = pieces_of(spec, data.draw, num_ranks)
            expected[index, spec.key] = whole.reshape(-1)
            for rank, piece in pieces:
                held[rank].setdefault((index, spec.key), []).append(piece)
    for window in _windows(files, window_bytes):
        filled = torch.full((window_bytes,), 255, dtype=torch.uint8)
        for mine in held:
            # The receiver knows of the pieces what was told: no values.
            theirs = {place: [_Piece(each.box, each.flat) for each in pieces] for place, pieces in mine.items()}
            sent, received = _shares(window, mine), _shares(window, theirs)
            size = 0
            for share in sent:
                assert share.begin == aligned(size, share.cut), "values follow each other in a message"
                size = share.begin + share.nbytes
            assert size <= window_bytes
            message = torch.full((size,), 255, dtype=torch.uint8)
            for share in sent:
                share.in_message(message).copy_(share.in_piece())
            for share in received:
                share.in_window(filled).copy_(share.in_message(message))
        for cut in window:
            nbytes = (cut.stop - cut.start) * cut.spec.dtype.itemsize
            values = filled[cut.begin : cut.begin + nbytes].view(cut.spec.dtype)
            assert torch.equal(values, expected[cut.file, cut.spec.key][cut.start : cut.stop])
