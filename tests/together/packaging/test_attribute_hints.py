"""Core names functions of other distributions in errors; they are there under these names."""

import pytest

import booster_runtime
import booster_tools
from booster_core import Booster
from booster_core.attribute_hints import HINTS

PACKAGES = {"booster_runtime": booster_runtime, "booster_tools": booster_tools}


def test_functions_that_take_a_booster_are_named_with_their_package():
    named = [call for call in (hint.split("`")[1] for hint in HINTS.values()) if call.split(".")[0] in PACKAGES]
    assert len(named) > 10
    for call in named:
        package, name = call.partition("(")[0].split(".")
        assert name in PACKAGES[package].__all__
    with pytest.raises(AttributeError, match=r"has no `train_batch`; call `booster_runtime\.train_batch\(booster, "):
        _ = Booster().train_batch
