import math
import re
import time

import pytest

from booster_core.errors import ConfigError
from booster_runtime.pictures import draw_curve
from booster_runtime.pictures.curves import _running_mean


def _lines(svg, color):
    found = re.findall(rf"<line x1='([\d.-]+)' y1='([\d.-]+)' x2='([\d.-]+)' y2='([\d.-]+)' stroke='{color}'", svg)
    return [tuple(map(float, line)) for line in found]


def test_a_curve_passes_through_its_values():
    svg = draw_curve([4.0, 2.0, 1.0, 0.0], title="loss", y_name="nats")
    lines = _lines(svg, "#b8cce0")
    assert [line[:2] for line in lines[1:]] == [line[2:] for line in lines[:-1]]
    top, bottom = lines[0][1], lines[-1][3]
    assert [line[3] for line in lines] == [top + (bottom - top) * share for share in (0.5, 0.75, 1.0)]


def test_values_that_are_not_finite_leave_a_gap():
    svg = draw_curve([3.0, 2.0, float("nan"), 2.0, 1.0], title="loss", y_name="nats")
    assert len(_lines(svg, "#b8cce0")) == 2
    assert "nan" not in svg


def test_negative_values_have_marks():
    assert ">-2<" in draw_curve([1.0, -2.0], title="reward", y_name="reward")


def test_a_curve_without_finite_values_raises():
    with pytest.raises(ConfigError, match="None of the 1 values of 'loss' is finite"):
        draw_curve([float("inf")], title="loss", y_name="nats")


def test_a_running_mean_is_that_of_finite_values_at_any_number_of_steps():
    nan, inf = float("nan"), float("inf")
    values = [float(step % 7) for step in range(100)]
    values[10], values[11], values[50], values[70] = inf, -inf, nan, 1e30
    for index, mean in enumerate(_running_mean(values)):
        finite = [value for value in values[max(0, index - 4) : index + 1] if math.isfinite(value)]
        if math.isfinite(values[index]):
            assert mean == pytest.approx(math.fsum(finite) / len(finite))
        else:
            assert math.isnan(mean)


def test_long_curves_are_drawn_in_linear_time():
    started = time.process_time()
    _running_mean([1.0] * 50_000)
    assert time.process_time() - started < 2.0
