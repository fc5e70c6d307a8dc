"""An option of a wrong type is refused when the plugin is made, by one check for all plugins."""

import pytest

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_zero import LowLevelZeroPlugin

WRONG = [
    (LowLevelZeroPlugin, {"bucket_bytes": "25MB"}, "`bucket_bytes='25MB'` must be of type int or None, not str"),
    (LowLevelZeroPlugin, {"stage": True}, "`stage=True` must be of type int, not bool"),
    (TorchDDPPlugin, {"bucket_cap_mb": "25"}, "`bucket_cap_mb='25'` must be of type float or None, not str"),
    (TorchFSDPPlugin, {"reshard_after_forward": "x"}, "`reshard_after_forward='x'` must be of type bool or int, not"),
    (HybridParallelPlugin, {"parallel_output": "no"}, "`parallel_output='no'` must be of type bool, not str"),
    (
        HybridParallelPlugin,
        {"pp_size": 2, "num_layers_per_stage": ["1", "1"]},
        r"`num_layers_per_stage=\['1', '1'\]` must be of type Sequence\[int\] or None, not list",
    ),
]


@pytest.mark.parametrize(("plugin", "options", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_an_option_of_a_wrong_type_is_named_with_what_it_takes(plugin, options, message):
    with pytest.raises(TypeError, match=message):
        plugin(**options)


def test_a_whole_number_is_a_number():
    assert LowLevelZeroPlugin(max_norm=1).config.max_norm == 1
