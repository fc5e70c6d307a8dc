"""Names that have moved to a distribution of their own are found at their former place."""

import sys

import pytest


def test_trainers_are_found_at_their_former_place_with_a_warning(monkeypatch):
    with pytest.warns(DeprecationWarning, match="Import `with_booster` from `booster_trainer`"):
        from booster_tools.integrations.transformers import with_booster
    assert with_booster.__module__.startswith("booster_trainer")
    monkeypatch.setitem(sys.modules, "booster_trainer", None)
    with pytest.raises(ImportError, match="`pip install booster-trainer`"):
        from booster_tools.integrations.transformers import BoosterTrainer  # noqa: F401
