"""Headers, indexes and parameter groups that are damaged or hostile: `CheckpointError`, and never another error.

`test_safetensors_fuzz.py` draws odd headers of usual sizes.
"""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from booster_checkpoint.files.names import FileNames
from booster_checkpoint.load.load import read_optimizer_info
from booster_checkpoint.load.source import Source
from booster_core.errors import CheckpointError

DEEP = "[" * 900 + "]" * 900
# More than Python's own reader of JSON takes: since 3.12 that is not the limit of the interpreter's stack.
DEEPER = 200_000
GROUPS = {"format_version": 1, "param_groups": [], "scalars": {}, "param_shapes": {}}


def write_header(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 16)


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
    write_header(tmp_path / "m.safetensors", header)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        Source(tmp_path / "m.safetensors", "model").close()


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
    write_header(tmp_path / "m.safetensors", header)
    with pytest.raises(CheckpointError, match=match):
        Source(tmp_path / "m.safetensors", "model").close()


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
    source = Source(tmp_path, "optimizer")
    try:
        with pytest.raises(CheckpointError, match=r"param_groups\.json|cannot be read"):
            read_optimizer_info(source)
    finally:
        source.close()
