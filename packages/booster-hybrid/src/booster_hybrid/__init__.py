"""Any product of tensor, pipeline, sequence, expert and data parallelism, as a plugin of Booster."""

from __future__ import annotations

from booster_hybrid.config import DataParallelConfig, HybridConfig, PipelineConfig, SequenceConfig
from booster_hybrid.plugin import HybridParallelPlugin
from booster_hybrid.policy.base import ExpertRule, ModuleRule, ShardingPolicy, Style
from booster_hybrid.split_logits import SplitLogits

__all__ = [
    "DataParallelConfig",
    "ExpertRule",
    "HybridConfig",
    "HybridParallelPlugin",
    "ModuleRule",
    "PipelineConfig",
    "SequenceConfig",
    "ShardingPolicy",
    "SplitLogits",
    "Style",
]
