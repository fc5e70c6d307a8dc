import pytest

from booster_core import discovery
from booster_core.errors import ConfigError
from booster_gemini import GeminiPlugin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_param_frac": 1.5}, "`shard_param_frac=1.5` must be between 0"),
        ({"offload_param_frac": -0.1}, "`offload_param_frac=-0.1` must be between 0"),
        ({"offload_optim_frac": 1.1}, "`offload_optim_frac=1.1` must be between 0"),
        ({"offload_optim_frac": float("nan")}, "`offload_optim_frac=nan` must be between 0"),
        (
            {"offload_param_frac": 0.5, "placement_policy": "auto"},
            "is for placement_policy='static', and this is 'auto'",
        ),
        ({"memory_budget_bytes": 10}, "`memory_budget_bytes=10` is for placement_policy='auto'"),
        (
            {"memory_budget_bytes": 0, "placement_policy": "auto"},
            "`memory_budget_bytes=0` must be positive; it is a number of bytes",
        ),
        ({"placement_policy": "auto"}, "`placement_policy='auto'` needs `memory_budget_bytes`"),
        ({"placement_policy": "mine"}, "`placement_policy='mine'` is not one of 'static', 'auto'"),
        ({"offload_dir": "here"}, "`offload_dir='here'` would stay empty"),
        ({"min_chunk_bytes": 0}, "`min_chunk_bytes=0` must be positive"),
        ({"max_prefetch": -1}, "`max_prefetch=-1` must be 0"),
        ({"partition": "rows"}, "`partition='rows'` is not one of 'auto', 'flat', 'parameter'"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    """Of the options that Gemini shares with ZeRO, `test_zero_config` has the others."""
    with pytest.raises(ConfigError, match=message):
        GeminiPlugin(**options)


def test_it_is_found_by_name_and_passes_its_options_on():
    assert discovery.load("gemini") is GeminiPlugin
    plugin = GeminiPlugin(max_prefetch=3, precision="bf16")
    assert (plugin.config.max_prefetch, plugin.precision.name) == (3, "bf16")
