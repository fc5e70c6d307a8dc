"""Where an optimizer's checkpoint keeps what is not a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import CheckpointError
from booster_core.state import OptimizerInfo, read_json

if TYPE_CHECKING:
    from booster_checkpoint.load.source import Source


def read_optimizer_info(source: Source) -> OptimizerInfo:
    """Return parameter groups and other state: from the file itself, or from the file next to the index."""
    if "optimizer" in source.values:
        return OptimizerInfo.from_json(source.values["optimizer"], str(source.path))
    path = source.groups_path
    if path is None or not path.is_file():
        msg = f"'{source.path}' holds no optimizer checkpoint: it comes without parameter groups ('param_groups.json')."
        raise CheckpointError(msg)
    return OptimizerInfo.from_json(read_json(path), str(path))
