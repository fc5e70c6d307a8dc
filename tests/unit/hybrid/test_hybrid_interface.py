from __future__ import annotations

import pytest

from booster_core import discovery
from booster_core.errors import ConfigError
from booster_core.precision import LossScaleConfig
from booster_hybrid import HybridParallelPlugin
from booster_zero import ZeroConfig


def test_it_is_found_by_name():
    assert discovery.load("hybrid") is HybridParallelPlugin


def test_options_reach_the_config():
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1, precision="bf16")
    assert (plugin.config.tensor.size, plugin.config.pipeline.num_stages, plugin.config.zero.stage) == (2, 2, 1)
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 0}, "The tensor size 0 must be at least 1"),
        ({"pp_size": 2, "num_microbatches": 2, "microbatch_size": 4}, "two answers to one question"),
        ({"pp_size": 2, "microbatch_size": 0}, "`microbatch_size=0` must be at least 1"),
        ({"num_microbatches": 2}, "`num_microbatches=2` is about a pipeline, and `pp_size=1` makes none"),
        ({"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 3}, "'zbv'` puts 2 stage"),
        ({"pp_size": 2, "num_layers_per_stage": [2]}, r"`num_layers_per_stage=\[2\]` must list 2 positive numbers"),
        ({"pp_style": "fifo"}, "`pp_style='fifo'` is not one of 'gpipe'"),
        ({"sequence_parallelism_mode": "none"}, "`sequence_parallelism_mode='none'` is not one of"),
        ({"sp_size": 2}, "`sp_size=2` needs a `sequence_parallelism_mode`"),
        ({"sp_size": 2, "sequence_parallelism_mode": "split_gather"}, "splits over the tensor parallel ranks"),
        ({"sequence_parallelism_mode": "split_gather"}, "over the tensor parallel ranks, but `tp_size=1`"),
        ({"sequence_parallelism_mode": "ring_attn"}, "splits sequences over `sp_size` ranks, which is 1"),
        ({"zero_stage": 3}, "`stage=3` is not one of"),
        ({"cpu_offload": True}, "`zero_stage=0` shards nothing"),
        ({"zero": ZeroConfig(), "zero_stage": 2}, r"`zero=ZeroConfig\(...\)` says what `zero_stage=2` says, too"),
        ({"zero": ZeroConfig(), "max_norm": 0.5}, "says what `max_norm=0.5` says, too"),
        ({"zero": ZeroConfig(replica_size=2)}, r"`zero=ZeroConfig\(replica_size=2\)`: all data parallel ranks share"),
        ({"zero": ZeroConfig(overlap_allgather=True), "tp_size": 2}, "can't be had with `tp_size=2`"),
        ({"loss_scale": LossScaleConfig()}, "`loss_scale` is about fp16"),
        ({"precision": "bf16", "loss_scale": LossScaleConfig()}, "fp16"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        HybridParallelPlugin(**options)


def test_a_wrong_precision_is_refused_at_once():
    with pytest.raises(ConfigError, match="Unknown precision 'int4'"):
        HybridParallelPlugin(precision="int4")
