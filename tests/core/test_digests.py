from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from booster_core.ranks import digest


@dataclass
class Options:
    size: int
    values: torch.Tensor


class Kind(enum.Enum):
    FAST = 1
    SLOW = 2


def double(value):
    return 2 * value


class Plain:
    """Is printed with its address."""


EQUAL = [
    ({"a": 1, "b": [2]}, OrderedDict(b=(2,), a=1)),
    ({3, "x", (1,)}, {(1,), "x", 3}),
    (float("nan"), float("nan")),
    (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t()),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
    (torch.arange(4)[::2], torch.tensor([0, 2])),
    (torch.zeros(0), torch.zeros(0)),
    (torch.ones(()).expand(1, 1), torch.ones(1, 1)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    (Options(1, torch.ones(2)), Options(1, torch.ones(2))),
    (Plain(), Plain()),
    (functools.partial(double, 1), functools.partial(double, 1)),
    ({1: "x", None: "y"}, {None: "y", 1: "x"}),
    (b"ab", bytearray(b"ab")),
    ("\ud800", "\ud800"),
]  # fmt: skip

DIFFERENT = [
    (1, 1.0), (1, True), (1, "1"), (None, 0), (0.0, -0.0), ([1, 2], [2, 1]), ([[1], 2], [[1, 2]]), ("ab", ["a", "b"]),
    ({1: "x"}, {"1": "x"}), ({"a": {"b": 1}}, {"a.b": 1}), (b"ab", "ab"), ({1}, [1, 1]),
    (torch.zeros(2), torch.zeros(2, 1)), (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), -torch.zeros(2)), (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    (torch.tensor(1), 1), (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j),
    (Options(1, torch.ones(2)), Options(1, torch.zeros(2))), (Kind.FAST, Kind.SLOW), (double, Plain),
    (Path("a"), Path("b")),
    (functools.partial(double, 1), functools.partial(double, 2)), (torch.float32, torch.float16),
    (torch.float32, "torch.float32"), ([double], [f"{__name__}.double"]),
    (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_have_one_digest(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_values_have_another(one, other):
    assert digest(one) != digest(other)


def test_a_digest_is_16_bytes_and_the_same_in_every_process():
    assert digest({"seed": 1024, "names": ["a", None]}).hex() == "23f53f12262d0df537a10a9e02cdf0ce"
    assert len(digest(None)) == 16
