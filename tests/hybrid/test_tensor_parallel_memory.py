"""What splitting a model, its loss and its gathers hold in memory, measured as the kernel counts it."""

from itertools import pairwise

import pytest
import torch
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_hybrid.mesh import RankGroup
from booster_hybrid.tensor_parallel.collectives import gathered_last
from booster_hybrid.tensor_parallel.vocabulary import ByVocabulary, vocabulary_cross_entropy
from booster_testing import peak_memory

MIB = 2**20


TOKENS, VOCABULARY = 4096, 8192


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@on_ranks(2)
def test_the_loss_needs_no_copy_of_the_logits(dtype):
    """Only their gradient is as large, in their own format; in bf16 a copy in fp32 would take twice as much."""
    group = RankGroup.of(None)
    width = VOCABULARY // group.size
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    logits = torch.randn(TOKENS, width).to(dtype).requires_grad_()
    vocabulary = ByVocabulary([width] * group.size, group)
    vocabulary_cross_entropy(logits[:8], labels[:8], vocabulary).sum().backward()
    logits.grad = None
    with peak_memory() as forward:
        losses = vocabulary_cross_entropy(logits, labels, vocabulary)
    with peak_memory() as backward:
        losses.mean().backward()
    forward, backward, nbytes = forward.peak_bytes, backward.peak_bytes, logits.numel() * logits.element_size()
    assert forward < 0.5 * nbytes
    assert nbytes <= backward < 1.5 * nbytes


@matrix(["2-dtype2"], size=[2, 3], dtype=[torch.float64, torch.float32, torch.bfloat16])
@on_ranks("size")
def test_the_loss_of_split_logits_is_that_of_whole_ones(dtype, size):
    group = RankGroup.of(None)
    torch.manual_seed(0)
    vocabulary, num_tokens = 1001, 600  # several blocks, uneven parts
    labels = torch.randint(vocabulary, (num_tokens,))
    labels[::7] = -100
    whole = (torch.randn(num_tokens, vocabulary) * 5).to(dtype).requires_grad_()
    weights = torch.rand(num_tokens)
    cuts = [vocabulary * rank // size for rank in range(size + 1)]
    part = whole.detach()[:, cuts[group.rank] : cuts[group.rank + 1]].clone().requires_grad_()
    expected = nn.functional.cross_entropy(
        whole.to(torch.promote_types(dtype, torch.float32)), labels, reduction="none"
    )
    sizes = [stop - start for start, stop in pairwise(cuts)]
    found = vocabulary_cross_entropy(part, labels, ByVocabulary(sizes, group))
    torch.testing.assert_close(found, expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[:, cuts[group.rank] : cuts[group.rank + 1]])


@on_ranks(2)
def test_extreme_logits_have_finite_losses():
    group = RankGroup.of(None)
    whole = torch.tensor(
        [[1e4, -1e4, 0.0, 9.9e3], [-3e38, -3e38, -3e38, -3e38], [float("-inf"), float("-inf"), 1.0, 2.0]]
    )
    labels = torch.tensor([0, 2, 3])
    expected = nn.functional.cross_entropy(whole, labels, reduction="none")
    part = whole[:, group.rank * 2 : group.rank * 2 + 2].clone().requires_grad_()
    found = vocabulary_cross_entropy(part, labels, ByVocabulary([2, 2], group))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert part.grad.isfinite().all()


@pytest.mark.parametrize(("sizes", "num_rows"), [([3, 2], 2), pytest.param([1_000_000, 2], 4, marks=pytest.mark.slow)])
@on_ranks(2)
def test_gather_last_makes_no_second_copy(sizes, num_rows):
    group = RankGroup.of(None)
    cuts = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    whole = torch.arange(num_rows * sum(sizes), dtype=torch.float32).view(num_rows, sum(sizes))
    part = whole[:, cuts[group.rank] : cuts[group.rank + 1]]
    with peak_memory() as used:
        found = gathered_last(part.unflatten(0, (2, -1)) if num_rows else part, sizes, group)
    torch.testing.assert_close(found.view(whole.shape), whole)
    peak, nbytes = used.peak_bytes, whole.numel() * 4
    assert peak < nbytes + 12 * MIB
