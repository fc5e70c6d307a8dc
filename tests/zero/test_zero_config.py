import pytest
import torch

from booster_core.errors import ConfigError
from booster_core.precision import PrecisionPolicy
from booster_zero import LowLevelZeroPlugin, ZeroConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "`stage=3` is not one of 1 .* or 'hybrid' with `zero_stage=3`"),
        ({"bucket_bytes": 0}, "`bucket_bytes=0` must be positive"),
        ({"replica_size": 0}, "`replica_size=0` must be positive"),
        ({"max_norm": -1.0}, "`max_norm=-1.0` must be 0"),
        ({"max_norm": float("nan")}, "`max_norm=nan`"),
        ({"partition": "rows"}, "`partition='rows'` is not one of 'auto', 'flat', 'parameter'"),
        ({"unused": "ignore"}, "`unused='ignore'` is not one of"),
        ({"communication_dtype": "fp8"}, "`communication_dtype='fp8'` is not one of"),
        ({"communication_dtype": torch.int8}, "`communication_dtype=torch.int8`"),
        ({"offload": "tape"}, "`offload='tape'` is not one of None, 'cpu'"),
        (
            {"offload": "disk"},
            "plugin='gemini' with `shard_param_frac=0.0`, `offload_optim_frac=1.0` and `offload_dir=`",
        ),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        LowLevelZeroPlugin(**options)


def test_a_folder_for_state_is_geminis():
    with pytest.raises(TypeError, match=r"`GeminiPlugin\(shard_param_frac=0.0, offload_optim_frac=1.0, offload_dir="):
        LowLevelZeroPlugin(offload="disk", offload_dir="here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "`stage=4` is not one of 1 .*, 2 .* and 3"),
        ({"stage": 3, "overlap_allgather": True}, "`overlap_allgather=True` is for stages 1 and 2"),
    ],
)
def test_what_stage_3_lacks_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        ZeroConfig(**options)


def test_cpu_offload_is_one_name_for_two():
    assert ZeroConfig(cpu_offload=True).offload == ZeroConfig(offload="cpu").offload == "cpu"


def test_masters_can_be_left_out():
    policy = LowLevelZeroPlugin(master_weights=False).resolve_precision(PrecisionPolicy.parse("bf16"))
    assert (policy.param_dtype, policy.master_dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_communication_format_is_part_of_the_precision():
    plugin = LowLevelZeroPlugin(communication_dtype="bf16")
    assert plugin.resolve_precision(PrecisionPolicy.parse("fp32")).reduce_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="two answers to one question"):
        plugin.resolve_precision(PrecisionPolicy(reduce_dtype=torch.float16))
