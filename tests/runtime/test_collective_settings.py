import pytest
import torch
import torch.distributed as dist

from booster_runtime.collectives.sums import combine_into, sum_into


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op_name", ["SUM", "AVG", "MAX", "MIN"])
def test_a_reduction_into_one_of_its_terms_is_that_into_fresh_memory(own, dtype, op_name):
    op = getattr(dist.ReduceOp, op_name)
    terms = [torch.randn(50, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
    fresh = torch.empty(50, dtype=dtype)
    combine_into(fresh, terms, op)
    combine_into(terms[own], terms, op)
    assert torch.equal(terms[own], fresh)


def test_a_sum_into_a_narrower_dtype_keeps_its_terms():
    terms = [torch.full((3,), float(rank)) for rank in range(1, 4)]
    out = torch.empty(3, dtype=torch.bfloat16)
    sum_into(out, terms, scale=0.5, accumulate=False)
    assert out.tolist() == [3.0] * 3
    assert [term[0].item() for term in terms] == [1.0, 2.0, 3.0]
