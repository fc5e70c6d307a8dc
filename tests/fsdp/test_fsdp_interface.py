import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin


def test_options_reach_the_config():
    plugin = TorchFSDPPlugin(replica_size=2, unit_classes=["Block"], precision="bf16")
    assert plugin.config.replica_size == 2
    assert plugin.describe()["unit_classes"] == ("Block",)
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard_after_forward": 1}, "`reshard_after_forward=1` is the size of a group"),
        ({"replica_size": 0}, "`replica_size=0` must be at least 1"),
        ({"unit_min_numel": 0}, "`unit_min_numel=0` must be at least 1"),
        ({"forward_prefetch": -1}, "`forward_prefetch=-1` must be at least 0"),
        ({"backward_prefetch": -1}, "`backward_prefetch=-1` must be at least 0"),
        ({"max_norm": -1.0}, "`max_norm=-1.0` must be 0"),
        ({"partition": "rows"}, "`partition='rows'` is not one of"),
        ({"unit_classes": ["A"], "unit_min_numel": 1}, "`unit_classes` and `unit_min_numel` all choose the units"),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float16), "precision": "bf16"},
            r"`mixed_precision` has param_dtype torch.float16, and the precision 'bf16' asks for torch.bfloat16",
        ),
    ],
)
def test_invalid_option_raises(options, message):
    with pytest.raises(ConfigError, match=message):
        TorchFSDPPlugin(**options)


@pytest.mark.parametrize("option", ["unit_classes", "ignored_modules", "ignored_parameters", "forward_methods"])
def test_string_instead_of_names_raises(option):
    with pytest.raises(TypeError, match=f"`{option}='Block'` is one string"):
        TorchFSDPPlugin(**{option: "Block"})
