"""What people use around a training and no strategy needs: planner, verification, tracking, profiling, notebooks.

Public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_tools.batch_size import BatchSize, find_batch_size
    from booster_tools.determinism import deterministic
    from booster_tools.functions import TrainingFunctions
    from booster_tools.guarding import guard
    from booster_tools.notebooks import notebook_launch
    from booster_tools.planning import choose_plugin, plan
    from booster_tools.profiling import profile
    from booster_tools.tracking import track
    from booster_tools.verification import verify

__all__ = [
    "BatchSize",
    "TrainingFunctions",
    "choose_plugin",
    "deterministic",
    "find_batch_size",
    "guard",
    "notebook_launch",
    "plan",
    "profile",
    "track",
    "verify",
]

__getattr__, __dir__ = public_names(__name__)
