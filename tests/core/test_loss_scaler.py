"""The loss scale after any run of steps is that of torch's own scaler."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_core.precision import DynamicLossScaler, LossScaleConfig
from booster_core.precision.loss_scaler import any_raised, unscale

INTERVALS = st.integers(1, 4)
OVERFLOWS = st.lists(st.booleans(), max_size=30)


def scales_of_ours(scaler, overflows):
    scales = []
    for overflow in overflows:
        scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    return scales


@settings(deadline=None)
@given(INTERVALS, OVERFLOWS, st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]))
def test_the_scale_follows_torchs(interval, overflows, growth, backoff):
    # Powers of two within fp32's range, which torch keeps the scale in; torch has no bounds.
    factors = {"growth_interval": interval, "growth_factor": growth, "backoff_factor": backoff}
    config = LossScaleConfig(initial_scale=1024.0, **factors, min_scale=2.0**-100, max_scale=2.0**100)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, **factors)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    expected = []
    for overflow in overflows:
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.scale(torch.zeros(()))  # as a loss would be, which makes the scale
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert scales_of_ours(DynamicLossScaler(config), overflows) == expected


def test_the_defaults_are_torchs():
    config, scaler = LossScaleConfig(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    assert config.initial_scale == scaler.get_scale()
    assert config.growth_factor == scaler.get_growth_factor()
    assert config.backoff_factor == scaler.get_backoff_factor()
    assert config.growth_interval == scaler.get_growth_interval()
    assert DynamicLossScaler().config == config
    assert (config.min_scale, config.max_scale) == (1.0, 4294967296.0)


@given(INTERVALS, OVERFLOWS)
def test_the_scale_stays_between_its_bounds(interval, overflows):
    config = LossScaleConfig(initial_scale=8.0, growth_interval=interval, min_scale=3.0, max_scale=20.0)
    scale, good = 8.0, 0
    expected = []
    for overflow in overflows:
        good = 0 if overflow else good + 1
        if overflow:
            scale = max(scale * 0.5, 3.0)
        elif good == interval:
            scale, good = min(scale * 2.0, 20.0), 0
        expected.append(scale)
    assert scales_of_ours(DynamicLossScaler(config), overflows) == expected


@given(INTERVALS, OVERFLOWS, OVERFLOWS)
def test_a_restored_scaler_continues(interval, before, after):
    config = LossScaleConfig(initial_scale=64.0, growth_interval=interval)
    scaler, restored = DynamicLossScaler(config), DynamicLossScaler(config)
    scales_of_ours(scaler, before)
    restored.load_state_dict(scaler.state_dict())
    assert scales_of_ours(restored, after) == scales_of_ours(scaler, after)


def test_a_scale_grows_after_more_good_steps_than_its_interval():
    """A state may come from a run with a longer interval."""
    scaler = DynamicLossScaler(LossScaleConfig(initial_scale=8.0, growth_interval=3))
    scaler.load_state_dict({"scale": 8.0, "num_good_steps": 5})
    assert scales_of_ours(scaler, [False] * 4) == [16.0, 16.0, 16.0, 32.0]


def test_the_state_has_numbers_of_their_kind():
    scaler = DynamicLossScaler()
    scaler.load_state_dict({"scale": 8, "num_good_steps": 3.0})
    assert scaler.state_dict() == {"scale": 8.0, "num_good_steps": 3}
    assert [type(value) for value in scaler.state_dict().values()] == [float, int]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, r"0 < min_scale .* got min_scale=0\.0, initial_scale=65536\.0, max_scale=4294967296\.0"),
        ({"min_scale": -1.0}, "0 < min_scale"),
        ({"initial_scale": 0.5}, "min_scale <= initial_scale"),
        ({"initial_scale": 2.0**33}, "initial_scale <= max_scale"),
        ({"growth_factor": 0.99}, r"`growth_factor=0\.99` would shrink"),
        ({"backoff_factor": 0.0}, r"`backoff_factor=0\.0` must be between 0 and 1"),
        ({"backoff_factor": 1.0}, r"`backoff_factor=1\.0` must be between 0 and 1"),
        ({"growth_interval": 0}, "`growth_interval=0` counts steps"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LossScaleConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"min_scale": 1.0, "initial_scale": 1.0, "max_scale": 1.0},
        {"min_scale": 0.25, "initial_scale": 0.5},
        {"growth_factor": 1.0},
        {"growth_interval": 1},
        {"backoff_factor": 0.999},
    ],
)
def test_settings_at_the_ends_of_their_ranges_are_taken(options):
    LossScaleConfig(**options)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_what_is_not_finite_is_found(bad, dtype):
    def good():
        return [torch.ones(3), torch.zeros(0), torch.full((2,), 3e38), torch.ones(2, 3, dtype=dtype).t()]

    assert not any_raised(unscale(good(), 4.0))
    assert any_raised(unscale([*good(), torch.tensor([1.0, bad], dtype=dtype)], 4.0))
    assert any_raised(unscale([torch.tensor([bad, 1.0], dtype=dtype), *good()], 4.0))
    assert any_raised(unscale([torch.tensor(bad, dtype=dtype)], 4.0))


def test_tensors_without_elements_are_finite():
    assert any_raised(unscale([torch.zeros(0), torch.zeros(2, 0)], 2.0)) is False
    assert any_raised(unscale([], 2.0)) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("scale", [2.0**16, 0.5, 1.0])
def test_gradients_are_divided_by_the_scale(dtype, scale):
    given = [torch.randn(5, 3, dtype=dtype), torch.randn(4, 2, dtype=dtype).t(), torch.randn((), dtype=dtype)]
    expected = [each / scale for each in given]
    unscale(given, scale)
    for found, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_unscaling_is_seen_by_whoever_copied_a_gradient_before():
    flat = torch.full((4,), 8.0)
    gradient, before = flat[:2], flat._version
    unscale([gradient], 4.0)
    assert gradient.tolist() == [2.0, 2.0]
    assert flat._version > before
