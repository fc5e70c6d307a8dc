"""Track a run: each optimizer step's metrics, and values of your own, go to files or services."""

from __future__ import annotations

from booster_tools.tracking.interface import Meter, Tracker
from booster_tools.tracking.json_lines import JsonLines, read_json_lines
from booster_tools.tracking.routers import RouterStatistics
from booster_tools.tracking.run import TrackedRun, track
from booster_tools.tracking.run_services import MLflow, Trackio, WeightsAndBiases
from booster_tools.tracking.snapshots import MemorySnapshots, memory_snapshots
from booster_tools.tracking.stragglers import Stragglers
from booster_tools.tracking.tensorboard import TensorBoard
from booster_tools.tracking.throughput import Throughput

__all__ = [
    "JsonLines",
    "MLflow",
    "MemorySnapshots",
    "Meter",
    "RouterStatistics",
    "Stragglers",
    "TensorBoard",
    "Throughput",
    "TrackedRun",
    "Tracker",
    "Trackio",
    "WeightsAndBiases",
    "memory_snapshots",
    "read_json_lines",
    "track",
]
