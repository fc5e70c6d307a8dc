"""Headers, indexes and parameter groups that are damaged or hostile: `CheckpointError`, and never another error.

Odd headers of usual sizes are drawn, and read by the library, too. Disagreements, all of them on purpose:

- We refuse what no writer makes and the library lets pass: a name that occurs twice (it takes the last), and the
  dtypes that torch lacks or we can't store.
- We read what the library refuses: bytes between tensors or after the last one, which other writers leave for
  alignment. No tensor's values differ by that.
"""

import contextlib
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from booster_checkpoint.files.names import FileNames
from booster_checkpoint.files.safetensors_file import DTYPE_NAMES
from booster_checkpoint.load.load import read_optimizer_info
from booster_checkpoint.load.source import Source
from booster_core.errors import CheckpointError

DEEP = "[" * 900 + "]" * 900
# More than Python's own reader of JSON takes: since 3.12 that is not the limit of the interpreter's stack.
DEEPER = 200_000
GROUPS = {"format_version": 1, "param_groups": [], "scalars": {}, "param_shapes": {}}


def build(header, values=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def assert_header_is_refused(header, match, folder):
    (folder / "m.safetensors").write_bytes(build(header, b"\0" * 16))
    with pytest.raises(CheckpointError, match=match):
        Source(folder / "m.safetensors", "model").close()


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        entry(dtype=["F32"]),
        entry(shape=[0, 1 << 70], data_offsets=[0, 0]),
        entry(shape=[1] * 100_000),
        entry(data_offsets=[1 << 70, (1 << 70) + 16]),
        {"__metadata__": [1]},
        {"__metadata__": {"booster.x": DEEP * 20}},
        {"__metadata__": {"booster.x": 3}},
        {"__metadata__": {"booster.x": '{"$tensor": ["a"]}'}},
        {"__metadata__": {"booster.x": '{"a": ' * DEEPER + "1" + "}" * DEEPER}},
        f'{{"a": {DEEP}}}'.encode(),
        f'{{"a": {{"dtype": "F32", "shape": {DEEP}, "data_offsets": [0, 16]}}}}'.encode(),
        f'{{"a": {{"dtype": {DEEP}, "shape": [4], "data_offsets": [0, 16]}}}}'.encode(),
        f'{{"__metadata__": {DEEP}}}'.encode(),
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}',
        b"\xff\xfe",
    ],
    ids=range(16),
)
def test_safetensors_header(header, tmp_path):
    assert_header_is_refused(header, r"m\.safetensors", tmp_path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (entry(shape=[8], data_offsets=[0, 32]), "It is truncated or damaged"),
        (entry(data_offsets=[8, 16]), "takes 16: damaged"),
        ({**entry(), "b": entry(shape=[2], data_offsets=[8, 16])["a"]}, "'a' and 'b' share bytes"),
        (entry(dtype="F7"), "has dtype F7"),
        ({"a": {"dtype": "F32"}}, "the entry of 'a'"),
        (b'{"a":%s,"a":%s}' % ((json.dumps(entry()["a"]).encode(),) * 2), "a name occurs twice"),
    ],
)
def test_what_a_header_says_wrongly_is_named(header, match, tmp_path):
    assert_header_is_refused(header, match, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "null",
        "3",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["m.safetensors"]}}',
        '{"weight_map": {"a": "x\\u0000y"}}',
        '{"weight_map": {"a": "\\ud800"}}',
        '{"weight_map": {"a": "%s"}}' % ("n" * 300),
        '{"weight_map": {"a": "absent"}}',
        '{"weight_map": {"b": "m.safetensors"}}',
        f'{{"weight_map": {{"a": {DEEP}}}}}',
        f'{{"weight_map": {DEEP * 50}}}',
        "[" * 200_000,
    ],
    ids=range(15),
)
def test_index(content, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / FileNames(base="model").index).write_text(content)
    with pytest.raises(CheckpointError):
        Source(tmp_path, "model").close()


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {**GROUPS, "format_version": "1"},
        {**GROUPS, "format_version": None},
        {**GROUPS, "format_version": 99},
        {**GROUPS, "param_groups": {}},
        {**GROUPS, "param_groups": [3]},
        {**GROUPS, "param_groups": [{}]},
        {**GROUPS, "param_groups": [{"params": "abc"}]},
        {**GROUPS, "param_groups": [{"params": [["a"]]}]},
        {**GROUPS, "param_groups": [{"params": [3]}]},
        {**GROUPS, "scalars": []},
        {**GROUPS, "scalars": {"a": 3}},
        {**GROUPS, "param_shapes": {"a": "ab"}},
        {**GROUPS, "param_shapes": {"a": [[1]]}},
        {**GROUPS, "param_shapes": {"a": 3}},
        {**GROUPS, "param_shapes": []},
        {**GROUPS, "param_groups": [{"params": ["a"], "lr": {"$unknown": 3}}]},
    ],
    ids=range(19),
)
def test_parameter_groups(content, tmp_path):
    save_file({}, tmp_path / "optimizer-00001-of-00001.safetensors")
    (tmp_path / FileNames(base="optimizer").index).write_text('{"weight_map": {}}')
    (tmp_path / "param_groups.json").write_text(json.dumps(content))
    with (
        contextlib.closing(Source(tmp_path, "optimizer")) as source,
        pytest.raises(CheckpointError, match=r"param_groups\.json|cannot be read"),
    ):
        read_optimizer_info(source)


# ---- our reader of safetensors files and the library's, on files that are whole, odd and damaged

SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
KNOWN = sorted(DTYPE_NAMES.values())
_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


def ours(content):
    """Return the tensors as we read them; ``None`` where we refuse the file. No other error passes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(content)
        try:
            source = Source(path, "model")
        except CheckpointError:
            return None
        with contextlib.closing(source):
            return {key: source.read_whole(key) for key in source.tensors}


def theirs(content):
    try:
        return load(content)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError, RuntimeError):
        return None


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert found[key].view(-1).view(torch.uint8).tolist() == tensor.contiguous().view(-1).view(torch.uint8).tolist()


shapes = st.lists(st.integers(0, 3), max_size=3)
names = st.text(max_size=6).filter(lambda name: name != "__metadata__" and not name.startswith("booster."))


@st.composite
def headers(draw):
    """Return a header without gaps, and the number of bytes behind it."""
    header, offset = {}, 0
    for name in draw(st.lists(names, unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(KNOWN)), draw(shapes)
        nbytes = int(torch.Size(shape).numel()) * _BYTES.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
    return header, offset


@settings(max_examples=150, **SETTINGS)
@given(headers(), st.binary(min_size=4, max_size=4))
def test_whole_files_are_read_alike(made, pattern):
    header, nbytes = made
    content = build(header, (pattern * (nbytes // 4 + 1))[:nbytes])
    expected, found = theirs(content), ours(content)
    if expected is None:  # a dtype that this version of the library or its torch part lacks
        return
    assert found is not None
    assert_same(found, expected)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, **SETTINGS)
@given(headers(), st.sampled_from(["dtype", "shape", "data_offsets", "drop", "entry", "metadata", "more"]), st.data())
def test_odd_headers_are_refused_or_read_alike(made, what, data):
    header, nbytes = made
    keys = [key for key in header if key != "__metadata__"]
    if what == "metadata":
        header["__metadata__"] = data.draw(values)
    elif what == "more":
        header[data.draw(names)] = data.draw(values)
    elif keys and what == "entry":
        header[data.draw(st.sampled_from(keys))] = data.draw(values)
    elif keys and what == "drop":
        del header[data.draw(st.sampled_from(keys))][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
    elif keys:
        header[data.draw(st.sampled_from(keys))][what] = data.draw(values)
    compare(build(header, b"\1" * nbytes))


@settings(max_examples=300, **SETTINGS)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_alike(data):
    content = bytearray(save({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3, dtype=torch.int8)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    compare(bytes(content))


@settings(max_examples=150, **SETTINGS)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read_alike(content):
    compare(content)
    compare(build(content))


def compare(content):
    expected, found = theirs(content), ours(content)
    if expected is not None and found is not None:
        assert_same(found, expected)
    elif expected is not None:
        assert is_known_refusal(content), "the library reads it, and we do not"
    elif found is not None:
        assert is_known_gap(content), "we read it, and the library does not"


def is_known_refusal(content):
    """Whether a name occurs twice, or metadata of ours is not what we write."""
    twice = []

    def look(pairs):
        twice.append(len(pairs) != len(dict(pairs)))
        return dict(pairs)

    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]], object_pairs_hook=look)
    metadata = header.get("__metadata__") or {}
    return any(twice) or any(name.startswith("booster.") for name in metadata)


def is_known_gap(content):
    """Whether what is odd is bytes that no tensor has, metadata, more entries, or a dtype that the library lacks."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    ranges = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    has_gaps = [start for start, _ in ranges] != [0, *(stop for _, stop in ranges)][: len(ranges)]
    has_rest = (ranges[-1][1] if ranges else 0) != len(content) - 8 - length
    is_odd = not all(isinstance(value, str) for value in metadata.values()) if isinstance(metadata, dict) else True
    more = any(entry.keys() != {"dtype", "shape", "data_offsets"} for entry in header.values())
    lacks = False
    with contextlib.suppress(SafetensorError, KeyError, ValueError):
        for name in {entry["dtype"] for entry in header.values()}:
            one = {"x": {"dtype": name, "shape": [1], "data_offsets": [0, _BYTES[name]]}}
            lacks = lacks or theirs(build(one, b"\0" * _BYTES[name])) is None
    return has_gaps or has_rest or is_odd or more or lacks


@pytest.mark.parametrize(
    ("content", "reads"),
    [
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', (True, False)),  # noqa: E501
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, (False, True)),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, (False, True)),  # a byte is left
    ],
    ids=["twice", "gap", "rest"],
)  # fmt: skip
def test_where_we_disagree(content, reads):
    content = build(content, b"\1" if isinstance(content, bytes) else b"\1\1")
    assert (theirs(content) is not None, ours(content) is not None) == reads
