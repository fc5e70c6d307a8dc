"""Plain values come back from JSON exactly as they went in; other objects are refused by name."""

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_core.errors import CheckpointError
from booster_core.state import decode_json, encode_json, tensor_references

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tensor"), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain)
def test_values_survive_a_file(value):
    text = json.dumps(encode_json(value, "v"), allow_nan=False)
    back = decode_json(json.loads(text))
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "value", [Counter({3: 2, 5: 1}), {1, 2}, torch.bfloat16, OrderedDict(a=1), torch.tensor([1.5, -2.0]), 1e300]
)
def test_further_kinds(value):
    back = decode_json(json.loads(json.dumps(encode_json(value, "v"))))
    assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value


def test_not_a_number():
    assert math.isnan(decode_json(json.loads(json.dumps(encode_json(float("nan"), "v"), allow_nan=False))))


def test_tensors_are_handed_out_and_put_back():
    tensors = {}
    value = {"a": [torch.zeros(2), 3], "b": (torch.ones(1),)}
    encoded = encode_json(value, "x", tensors)
    assert list(tensors) == ["x/a/0", "x/b/0"]
    assert tensor_references(encoded) == ["x/a/0", "x/b/0"]
    back = decode_json(encoded, tensors)
    assert back["a"][0] is value["a"][0]
    assert back["b"][0] is value["b"][0]


@pytest.mark.parametrize("value", [object(), print, {"a": [lambda: 0]}, type("D", (dict,), {})(a=1)])
def test_objects_are_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"'v.*cannot be saved: checkpoints hold tensors and JSON values"):
        encode_json(value, "v")


@pytest.mark.parametrize("value", [{"$unknown": 1}, {"$tensor": "gone"}, {"$dtype": "Tensor"}, {"$float": "x"}])
def test_damaged_values_are_refused(value):
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_json(value)
