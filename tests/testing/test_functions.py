"""The kit's tests as functions: those of the class, run with what the fixture ``plugin`` says."""

from functools import partial

import pytest
from faulty_plugins import FAULTY
from reference_plugins import ReferencePlugin

from booster_testing import PluginConformance, functions
from booster_testing.functions import (
    test_clips_by_value,
    test_describe_names_plugin_and_precision,
    test_invalid_max_norm_raises,
)

__all__ = ["test_clips_by_value", "test_describe_names_plugin_and_precision", "test_invalid_max_norm_raises"]


@pytest.fixture
def plugin():
    return partial(ReferencePlugin)


def test_every_test_of_the_class_is_a_function():
    assert {name for name in dir(PluginConformance) if name.startswith("test_")} == set(functions.__all__)


def test_a_fault_is_found_by_the_function_and_told_first():
    with pytest.raises(AssertionError, match=r"summed .*, not averaged"):
        functions.test_equals_one_process(plugin=FAULTY["SumsGradients"], optimizer="sgd")
