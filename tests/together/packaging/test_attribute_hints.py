"""Core names functions of other distributions in errors; they are there under these names."""

import importlib
import re

import pytest

from booster_core import Booster
from booster_core.attribute_hints import HINTS


def test_functions_that_take_a_booster_are_named_with_their_package():
    named = {call for hint in HINTS.values() for call in re.findall(r"[`\s](booster_\w+(?:\.\w+)+)", hint)}
    assert len(named) > 20
    for call in named:
        package, _, name = call.rpartition(".")
        assert name in importlib.import_module(package).__all__
    with pytest.raises(AttributeError, match=r"has no `train_batch`; call `booster_runtime\.train_batch\(booster, "):
        _ = Booster().train_batch
