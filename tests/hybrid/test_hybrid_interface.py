import dataclasses

import pytest

from booster_core import discovery
from booster_core.errors import ConfigError
from booster_core.precision import LossScaleConfig
from booster_hybrid import (
    DataParallelConfig,
    HybridConfig,
    HybridParallelPlugin,
    SequenceConfig,
    ShardingPolicy,
)
from booster_zero import ZeroConfig


def test_it_is_found_by_name():
    assert discovery.load("hybrid") is HybridParallelPlugin


def test_options_reach_the_config():
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1, precision="bf16")
    assert (plugin.config.tp_size, plugin.config.pipeline.num_stages, plugin.config.zero.stage) == (2, 2, 1)
    assert plugin.precision.name == "bf16"


def test_one_mesh_can_be_said_in_three_ways():
    theirs = HybridParallelPlugin(tp_size=2, sequence_parallelism_mode="split_gather")
    named = HybridParallelPlugin(tp_size=2, sequence_parallel=True)
    config = HybridConfig(tp_size=2, sequence=SequenceConfig(mode="split_gather"))
    passed = HybridParallelPlugin(config=config, precision="bf16", max_norm=1.0)
    assert theirs.config.sequence == named.config.sequence == passed.config.sequence
    assert passed.config is config
    assert (passed.tp_size, passed.precision.name, passed.describe()["max_norm"]) == (2, "bf16", 1.0)
    for name, mode in (("ring", "ring_attn"), ("ulysses", "all_to_all")):
        assert HybridParallelPlugin(sp_size=2, context_parallel=name).config.sequence.mode == mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 0}, "`tp_size=0` must be at least 1, which leaves that axis out"),
        ({"pp_size": -1}, "`pp_size=-1` must be at least 1"),
        ({"ep_size": 0}, "`ep_size=0` must be at least 1"),
        ({"mesh_order": ("dp", "tp")}, r"`mesh_order=\('dp', 'tp'\)` must name each of 'dp', 'pp', 'sp', 'tp' once"),
        ({"pp_size": 2, "num_microbatches": 2, "microbatch_size": 4}, "two answers to one question"),
        ({"pp_size": 2, "microbatch_size": 0}, "`microbatch_size=0` must be at least 1"),
        ({"num_microbatches": 2}, "`num_microbatches=2` is about a pipeline, and `pp_size=1` makes none"),
        ({"num_layers_per_stage": [2]}, r"`num_layers_per_stage=\(2,\)` is about a pipeline"),
        ({"num_model_chunks": 2, "pp_style": "interleaved"}, "`num_model_chunks=2` is about a pipeline"),
        ({"pp_style": "gpipe"}, "`pp_style='gpipe'` is about a pipeline"),
        ({"example_batch": [1]}, "`example_batch` is for finding the layers of a pipeline, and `pp_size=1` makes none"),
        ({"pipeline_record": "out"}, "`pipeline_record` writes down the work of a pipeline, and `pp_size=1`"),
        ({"split_batch": max}, "`split_batch` splits the batches of a pipeline, and `pp_size=1` makes none"),
        ({"pp_size": 2, "split_batch": max, "microbatch_size": 2}, "`microbatch_size=2` and `split_batch` are two"),
        ({"custom_policy": ShardingPolicy()}, "`custom_policy` says where a model is split"),
        ({"pp_size": 2, "num_model_chunks": 2}, "'1f1b'` puts 1 stage"),
        ({"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 1}, "interleaved"),
        ({"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 3}, "'zbv'` puts 2 stage"),
        ({"pp_size": 2, "num_layers_per_stage": [2]}, r"`num_layers_per_stage=\[2\]` must list 2 positive numbers"),
        ({"checkpoint_ratio": 0.5}, "`checkpoint_ratio=0.5` is about a pipeline, and `pp_size=1` makes none"),
        (
            {"pp_size": 2, "checkpoint_ratio": [0.5]},
            r"`checkpoint_ratio=\(0.5,\)` must be one number, or 2: one for each",
        ),
        ({"pp_size": 2, "checkpoint_ratio": (0.5, 1.5)}, "between 0 and 1, and above 0 for one stage at least"),
        ({"pp_size": 2, "checkpoint_ratio": 0.0}, "`None` leaves it to the model"),
        ({"pp_style": "fifo"}, "`pp_style='fifo'` is not one of 'gpipe'"),
        ({"sequence_parallelism_mode": "none"}, "`sequence_parallelism_mode='none'` is not one of"),
        ({"sp_size": 2}, "`sp_size=2` and `sequence_parallelism_mode=None` don't go together"),
        ({"sp_size": 2, "sequence_parallelism_mode": "split_gather"}, "'split_gather' over the tensor parallel ranks"),
        ({"sequence_parallelism_mode": "split_gather"}, "over the tensor parallel ranks, but `tp_size=1`"),
        (
            {"sequence_parallelism_mode": "ring_attn"},
            "`sp_size=1` and `sequence_parallelism_mode='ring_attn'` don't go",
        ),
        ({"context_parallel": "zigzag"}, "`context_parallel='zigzag'` is not 'ulysses' or 'ring'"),
        ({"tp_size": 2, "sequence_parallel": True, "context_parallel": "ring"}, "are two ways to split sequences"),
        ({"config": HybridConfig(), "tp_size": 2}, r"`tp_size=2` is a part of `config=HybridConfig\(...\)`"),
        ({"config": HybridConfig(zero=ZeroConfig()), "max_norm": 1.0}, "`max_norm=1.0` is a part of `config="),
        ({"zero_stage": 4}, "`zero_stage=4` is not one of 0 "),
        ({"zero_stage": 3, "ddp": DataParallelConfig()}, "and stage 3 of ZeRO has options of its own"),
        ({"ddp": DataParallelConfig(), "zero_stage": 1}, r"`ddp=DataParallelConfig\(...\)` is about `zero_stage=0`"),
        ({"ddp": DataParallelConfig(), "zero": ZeroConfig(stage=2)}, "and stage 2 of ZeRO has options of its own"),
        ({"cpu_offload": True}, "`zero_stage=0` shards nothing"),
        ({"zero": ZeroConfig(), "zero_stage": 2}, r"`zero=ZeroConfig\(...\)` says what `zero_stage=2` says, too"),
        ({"zero": ZeroConfig(), "max_norm": 0.5}, "says what `max_norm=0.5` says, too"),
        ({"zero": ZeroConfig(replica_size=2)}, r"`zero=ZeroConfig\(replica_size=2\)`: all data parallel ranks share"),
        ({"loss_scale": LossScaleConfig()}, "`loss_scale` is about fp16"),
        ({"precision": "bf16", "loss_scale": LossScaleConfig()}, "fp16"),
        ({"precision": "int4"}, "Unknown precision 'int4'"),
        ({"ddp": {"bucket_bytes": 4}}, "`ddp` is a `DataParallelConfig`; got `dict`"),
        ({"zero": 1}, "`zero` is a `ZeroConfig`; got `int`"),
        ({"pp_size": 2, "split_batch": 3}, "got `int`"),
        ({"config": {"tp_size": 2}}, "`config` is a `HybridConfig`; got `dict`"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(TypeError if "got `" in message else ConfigError, match=message):
        HybridParallelPlugin(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "`bucket_bytes=0` must be positive"),
        ({"communication_dtype": "int8"}, "`communication_dtype='int8'` is not one of"),
        ({"unused": "skip"}, "`unused='skip'` is not one of"),
    ],
)
def test_a_wrong_option_of_data_parallelism_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        DataParallelConfig(**options)


def test_the_description_names_what_data_parallelism_does():
    described = HybridParallelPlugin(ddp=DataParallelConfig(bucket_bytes=64), max_norm=0.5).describe()
    assert described["ddp"]["bucket_bytes"] == 64
    assert described["max_norm"] == 0.5
    assert described["mesh_order"] == ("dp", "pp", "sp", "tp")
    assert HybridParallelPlugin(zero=ZeroConfig(max_norm=2.0)).describe()["max_norm"] == 2.0


def test_data_parallel_config_has_zeros_options_that_do_not_concern_shards():
    ours = {field.name: field.default for field in dataclasses.fields(DataParallelConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(ZeroConfig)}
    of_shards = {"stage", "overlap_allgather", "cpu_offload", "offload", "replica_size", "partition"}
    assert ours == {name: theirs[name] for name in theirs.keys() - of_shards - {"max_norm"}}
