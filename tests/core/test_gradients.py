import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_threads
from torch import nn

from booster_core.errors import ConfigError, GradientError
from booster_core.gradients import (
    check_finite_norm,
    check_norm_arguments,
    clip_by_norm,
    clip_by_value,
    global_norm,
)


def test_norm_of_fp16_does_not_overflow():
    # The sum of squares, 1e6 * 1e4, is beyond fp16's 65504.
    assert float(global_norm([torch.full((10_000,), 100.0, dtype=torch.float16)])) == pytest.approx(1e4)


def test_norm_does_not_depend_on_how_elements_are_cut():
    elements = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    whole = global_norm([elements])
    assert torch.equal(whole, elements.double().norm().float())  # which fp32 sums miss
    assert all(torch.equal(whole, global_norm(elements.split(length))) for length in (1_000, 77_777, 2_900_000))


def test_norm_may_stay_wide():
    parts = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).split(3_000)
    wide = [global_norm([part], dtype=torch.float64) for part in parts]
    assert torch.equal(global_norm(wide, dtype=torch.float32), global_norm(parts))


def test_nothing_and_zeros_have_no_norm():
    assert float(global_norm([])) == 0.0
    assert float(global_norm([torch.zeros(3000), torch.zeros(3)])) == 0.0


def exact(tensors, norm_type=2.0):
    return float(torch.linalg.vector_norm(torch.cat([each.reshape(-1).double() for each in tensors]), norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_is_that_of_fp64_whatever_the_tensors_are(dtype, norm_type):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 1024), (33, 1025), (7,), (), (0,), (5000,), (1024,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors += [tensors[1].t(), tensors[0][:, ::2], torch.zeros(4096, dtype=dtype)]
    found = float(global_norm(tensors, norm_type, dtype=torch.float64))
    allowed = {torch.float64: 1e-13, torch.float32: 1e-7}
    assert found == pytest.approx(exact(tensors, norm_type), rel=allowed.get(dtype, 1e-6))


@pytest.mark.parametrize("value", [1e25, 1e-25, 3e-38])
def test_squares_beyond_fp32_are_counted(value):
    tensors = [torch.full((5000,), value), torch.full((10,), value)]
    assert float(global_norm(tensors, dtype=torch.float64)) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024, 1029])
def test_what_is_not_finite_shows(value, place):
    tensor = torch.ones(1030)
    tensor[place] = value
    norm = float(global_norm([torch.ones(2048), tensor]))
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_gradients_of_whole_rows_take_the_faster_kernels(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_norm", None)  # torch's slower kernel
    tensors = [torch.full((2, 1024), 2.0), torch.zeros(4096)]
    assert float(global_norm(tensors)) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_equals_torchs(max_norm, norm_type):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in [(3, 4), (7,), ()]]
    given.append(torch.randn(5, dtype=torch.complex64, generator=generator))
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in given]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    actual = given
    assert float(clip_by_norm(actual, max_norm, norm_type)) == pytest.approx(float(expected))
    for ours, parameter in zip(actual, parameters, strict=True):
        torch.testing.assert_close(ours, parameter.grad)


@pytest.mark.parametrize("max_norm", [1e-6, 1e-7])
def test_gradients_no_larger_than_the_guard_against_zero_are_clipped_as_torch_clips_them(max_norm):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.2e-6, 1.6e-6])
    ours = parameter.grad.clone()
    nn.utils.clip_grad_norm_([parameter], max_norm)
    clip_by_norm([ours], max_norm)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=0.0)


def test_clipping_mixed_formats():
    mixed = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    clip_by_norm(mixed, 1.0)
    assert [gradient.dtype for gradient in mixed] == [torch.float32, torch.bfloat16]
    assert float(global_norm(mixed)) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize(("largest", "expected"), [(0.5, [-0.5, -0.5, 0.2, 0.5]), (0, [0.0] * 4)])
def test_clipping_by_value(largest, expected):
    gradient = torch.tensor([-3.0, -0.5, 0.2, 9.0])
    clip_by_value([gradient], largest)
    assert gradient.tolist() == pytest.approx(expected)


NORM_TYPES = st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf])
ELEMENTS = st.lists(st.sampled_from([0.0, -2.0, 0.5, 3.0, 1e-20, 1e20]), max_size=6)


@pytest.fixture
def reduced_between_threads(monkeypatch):
    """Combine tensors of threads in the place of processes."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        terms = torch.stack(group.exchange(tensor.clone()))
        # A backend's largest of NaN and a number may be the number.
        tensor.copy_(
            terms.sum(0)
            if op == dist.ReduceOp.SUM
            else terms.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(0)
        )

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_backend", lambda group: dist.Backend.GLOO)


def norms(ranks, norm_type, **options):
    """Return the norm that each of several ranks computes of what they have together."""

    def work(group):
        held = [torch.tensor(each, dtype=torch.float64) for each in ranks[group.rank]]
        return global_norm(held, norm_type, groups=[group], **options)

    return on_threads(len(ranks), work)


@settings(deadline=None)
@given(st.lists(st.lists(ELEMENTS, max_size=3), min_size=1, max_size=4), NORM_TYPES)
@pytest.mark.usefixtures("reduced_between_threads")
def test_ranks_agree_on_the_norm_of_all_their_elements(ranks, norm_type):
    every = torch.tensor([each for held in ranks for part in held for each in part], dtype=torch.float64)
    # The powers of 1e20 are added up as they are, so they stay far from fp64's end.
    expected = torch.linalg.vector_norm(every, norm_type) if len(every) else torch.zeros((), dtype=torch.float64)
    found = norms(ranks, norm_type, dtype=torch.float64)
    torch.testing.assert_close(found, [expected] * len(ranks), rtol=1e-12, atol=0.0)
    assert all(torch.equal(norm, found[0]) for norm in found)


@pytest.mark.usefixtures("reduced_between_threads")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    ("bad", "expected"),
    [(math.nan, math.nan), (math.inf, math.inf), (-math.inf, math.inf)],
)
def test_what_is_not_finite_on_one_rank_shows_in_every_norm(norm_type, bad, expected):
    for position in range(3):
        ranks = [[[1.0]], [[2.0]], [[0.5]]]
        ranks[position] = [[1.0, bad]]
        found = [float(norm) for norm in norms(ranks, norm_type)]
        assert found == pytest.approx([expected] * 3, nan_ok=True)


@pytest.mark.usefixtures("reduced_between_threads")
def test_groups_are_summed_one_after_the_other():
    """Ranks in a grid of 2 x 2: the sum over rows and then columns counts every rank once."""

    def on_axis(group, line, rank):
        """Return a group of the ranks of one line of a grid, out of what all ranks exchange."""

        def exchange(value):
            everything = group.exchange((line, rank, value))
            return [each for other, _, each in sorted(everything, key=lambda item: item[1]) if other == line]

        return SimpleNamespace(exchange=exchange)

    def work(group):
        row = on_axis(group, group.rank // 2, group.rank % 2)
        column = on_axis(group, group.rank % 2, group.rank // 2)
        tensors = [torch.full((2,), float(group.rank + 1))]
        return [float(global_norm(tensors, norm_type, groups=[row, column])) for norm_type in (1.0, 2.0, math.inf)]

    assert on_threads(4, work) == [pytest.approx([20.0, math.sqrt(60.0), 4.0])] * 4


@pytest.mark.usefixtures("reduced_between_threads")
def test_a_rank_that_has_no_gradients_takes_part():
    found = norms([[], [[]], [[3.0], [], [4.0]]], 2.0)
    assert [float(norm) for norm in found] == [5.0, 5.0, 5.0]
    assert [norm.dtype for norm in found] == [torch.float32, torch.float32, torch.float64]


def test_a_norm_is_fp32_unless_a_gradient_is_fp64():
    narrow, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    assert global_norm([narrow]).dtype == torch.float32
    assert global_norm([narrow, wide]).dtype == torch.float64
    assert global_norm([narrow], dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.usefixtures("reduced_between_threads")
def test_each_rank_scales_all_it_holds_by_the_norm_of_what_is_counted():
    def work(group):
        replicated, own = torch.tensor([3.0]), torch.tensor([4.0 * group.rank])
        counted = [own] if group.rank else [own, replicated]
        norm = clip_by_norm([replicated, own], 0.5, counted=counted, groups=[group])
        return float(norm), float(replicated), float(own)

    first, second = on_threads(2, work)
    assert first == pytest.approx((5.0, 0.3, 0.0))
    assert second == pytest.approx((5.0, 0.3, 0.4))


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.0, 2.0), (math.inf, 1e-3), (1.0, math.inf)])
def test_limits_of_what_may_be_asked_are_taken(max_norm, norm_type):
    check_norm_arguments(max_norm, norm_type)


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "message"),
    [
        (-1.0, 2.0, r"`max_norm=-1\.0` must be 0 or more"),
        (math.nan, 2.0, "`max_norm=nan`"),
        (1.0, 0.0, r"`norm_type=0\.0` must be positive"),
        (1.0, -2.0, r"`norm_type=-2\.0`"),
        (1.0, math.nan, "`norm_type=nan`"),
    ],
)
def test_norms_that_mean_nothing_are_refused(max_norm, norm_type, message):
    gradient = torch.ones(2)
    with pytest.raises(ConfigError, match=message):
        check_norm_arguments(max_norm, norm_type)
    with pytest.raises(ConfigError, match=message):
        clip_by_norm([gradient], max_norm, norm_type)
    assert gradient.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_largest_magnitude_below_zero_is_refused(value):
    with pytest.raises(ConfigError, match=f"`clip_value={value}` must be 0 or more"):
        clip_by_value([torch.ones(1)], value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_raises_where_asked(bad):
    gradient = torch.tensor([1.0, bad])
    with pytest.raises(GradientError, match=f"is {bad}, and `error_if_nonfinite=True` forbids"):
        clip_by_norm([gradient], 1.0, error_if_nonfinite=True)
    assert float(gradient[0]) == 1.0, "nothing is scaled then"
    assert not math.isfinite(float(clip_by_norm([gradient], 1.0)))
    check_finite_norm(torch.tensor(1e30))


def test_a_norm_at_the_limit_is_left_alone():
    gradient = torch.tensor([3.0, 4.0])
    assert float(clip_by_norm([gradient], 5.1)) == 5.0
    assert gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("worst", [1.0, math.inf, math.nan])
def test_an_infinite_bound_changes_no_gradient(worst):
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([worst])]
    before = [each.clone() for each in gradients]
    norm = clip_by_norm(gradients, math.inf)
    assert torch.equal(norm, global_norm(before)) or (norm.isnan() and math.isnan(worst))
    assert all(a.equal(b) or (a.isnan() & b.isnan()).all() for a, b in zip(gradients, before, strict=True))
