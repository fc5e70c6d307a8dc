"""Attention under rules by torch's `flex_attention` is that under masks of whole sequences."""

from __future__ import annotations

import unittest.mock

import pytest
import torch
from defined_attention import attention_as_defined
from flex_on_cpus import flex_on_cpus
from thread_ranks import on_threads

from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel import flex_kernel, ring_attention
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility
from booster_runtime import collectives

LENGTH, SIZE = 22, 8


def all_to_all(source, sent, out, received, group):
    """Send slices between threads."""
    for sender, (values, bounds) in enumerate(group.exchange((source.detach().clone(), list(sent)))):
        out[received[sender] : received[sender + 1]].copy_(values[bounds[group.rank] : bounds[group.rank + 1]])
    return collectives.Pending(finish=lambda: None)


def mask_of(kind, generator):
    """Return what a layer is given, and the same as a tensor."""
    draw = torch.rand(2, 4, LENGTH, LENGTH, generator=generator)
    if kind in ("samples", "heads"):  # some queries see nothing
        whole = draw[:, : 1 if kind == "samples" else None] > 0.4
        whole[:, :, 3] = False
        return whole, whole
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
        sliding_window_overlay,
    )

    documents = (draw[:, 0, 0] > 0.8).cumsum(1)
    sees = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    sees &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    rules = [causal_mask_function, packed_sequence_mask_function(documents)]
    if kind == "window":
        rules.append(sliding_window_overlay(3))
        sees &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-2)
    padding = None
    if kind == "padded":
        padding = torch.ones(2, LENGTH, dtype=torch.bool)
        padding[1, :4] = False
        sees &= padding.unsqueeze(1)
    return SequenceMask(2, LENGTH, LENGTH, and_masks(*rules), padding, {}), sees.unsqueeze(1)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "key_heads", "has_sinks"),
    [
        ("documents", 1, 2, False),
        ("padded", 1, 4, True),
        ("heads", 1, 2, False),
        ("documents", 2, 2, True),
        ("padded", 2, 1, False),
        ("window", 3, 4, False),
        ("samples", 2, 2, False),
        ("heads", 2, 4, False),
    ],
)
def test_rules_give_what_whole_masks_give(monkeypatch, kind, num_ranks, key_heads, has_sinks):
    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    generator = torch.Generator().manual_seed(1)
    mask, dense = mask_of(kind, generator)
    shapes = [(2, 4, LENGTH, SIZE), *[(2, key_heads, LENGTH, SIZE)] * 2]
    whole = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    sinks = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() if has_sinks else None
    expected = attention_as_defined(*whole, mask=dense, sinks=sinks)
    (expected * weights).sum().backward()
    layout = SequenceLayout(LENGTH, num_ranks, zigzag=True)
    visibility = Visibility(mask, is_causal=False)

    def attend(group):
        local = [layout.take(each.detach(), 2, group.rank).clone().requires_grad_() for each in whole]
        own = None if sinks is None else sinks.detach().clone().requires_grad_()
        place = RankGroup(group, group.rank, group.size)
        call = ring_attention.AttentionCall(visibility, layout, place, sinks=own)
        found = ring_attention.ring_attention(*local, call)
        (found * layout.take(weights, 2, group.rank)).sum().backward()
        return [found.detach(), *(each.grad for each in local), None if own is None else own.grad]

    with flex_on_cpus() as calls:
        found, *gradients, of_sinks = zip(*on_threads(num_ranks, attend), strict=True)
    # One rank's backward is the kernel's; of several, each visit is attended again.
    assert len(calls) == (1 if num_ranks == 1 else 2 * num_ranks**2)
    torch.testing.assert_close(layout.put_together(found, 2), expected.detach())
    for ours, theirs in zip(gradients, whole, strict=True):
        torch.testing.assert_close(layout.put_together(ours, 2), theirs.grad)
    if sinks is not None:
        torch.testing.assert_close(sum(of_sinks), sinks.grad)


def test_other_documents_compile_nothing_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, LENGTH, SIZE, generator=generator) for _ in range(3)]
    layout, place = SequenceLayout(LENGTH, 1), RankGroup(None, 0, 1)
    counts = []
    with flex_on_cpus(lambda function: torch.compile(function, backend=counter)):
        for _ in range(3):
            mask, dense = mask_of("documents", generator)
            call = ring_attention.AttentionCall(Visibility(mask, is_causal=True), layout, place)
            inputs = [each.clone().requires_grad_() for each in whole]
            found = ring_attention.ring_attention(*inputs, call)
            found.sum().backward()
            torch.testing.assert_close(found, attention_as_defined(*whole, mask=dense))
            counts.append(counter.frame_count)
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "device", "size", "expected"),
    [
        (torch.bfloat16, "cuda", 64, True),
        (torch.float16, "xpu", 256, True),
        (torch.float32, "cuda", 64, False),
        (torch.bfloat16, "cuda", 8, False),
        (torch.bfloat16, "cpu", 64, False),
    ],
)
def test_rules_go_to_devices_that_have_a_kernel(monkeypatch, dtype, device, size, expected):
    monkeypatch.setattr(flex_kernel.importlib.util, "find_spec", lambda _: object())
    query = unittest.mock.Mock(dtype=dtype, device=torch.device(device), shape=(1, 4, 8, size))
    assert flex_kernel.takes_rules(query, query) == expected
