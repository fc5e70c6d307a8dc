"""Parts of a sequence that attend by a ring, or by exchanging heads, put together, are attention over the whole one."""

import math
import unittest.mock

import pytest
import torch
from defined_attention import attention_as_defined
from flex_on_cpus import flex_on_cpus
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thread_ranks import on_threads
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel import flex_kernel
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.kernels import ExplicitScores, FusedKernel
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention
from booster_runtime import collectives

SIZE, VALUE_SIZE = 4, 3
CASES = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4) | st.just(6),
        "length": st.integers(1, 9),
        "key_length": st.none() | st.integers(1, 9),
        "zigzag": st.booleans(),
        "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
        "batch": st.integers(1, 2),
        "value_size": st.sampled_from([VALUE_SIZE, SIZE]),
        "mask": st.sampled_from(["none", "causal", "bool", "packed", "rules", "added", "heads"]),
        "tile": st.sampled_from([1, 2, 3, 512]),
        "bias": st.none() | st.tuples(st.booleans(), st.booleans()),
        "trains_bias": st.booleans(),
        "sinks": st.booleans(),
        "softcap": st.none() | st.just(0.5),
        "scaling": st.none() | st.just(0.3),
        "exchanges_heads": st.booleans(),
    }
)


PLAIN = {
    "num_ranks": 2,
    "length": 8,
    "key_length": None,
    "zigzag": False,
    "heads": (2, 1),
    "batch": 2,
    "value_size": VALUE_SIZE,
    "mask": "none",
    "tile": 2,
    "bias": None,
    "trains_bias": False,
    "sinks": False,
    "softcap": None,
    "scaling": None,
    "exchanges_heads": False,
}


@pytest.fixture(autouse=True)
def exchange_between_threads(monkeypatch):
    """Send slices between threads. They arrive when the receiver waits, and not before."""

    def all_to_all(source, sent, out, received, group):
        everything = group.exchange((source.detach().clone(), list(sent)))
        out.fill_(math.nan)

        def arrive():
            for sender, (values, bounds) in enumerate(everything):
                part = values[bounds[group.rank] : bounds[group.rank + 1]]
                out[received[sender] : received[sender + 1]].copy_(part)

        assert out.numel() == received[-1]
        assert source.numel() == sent[-1]
        return collectives.Pending(finish=arrive)

    monkeypatch.setattr(collectives, "all_to_all", all_to_all)


def make(case, seed=0):
    """Return the whole query, key, value, bias and sinks, what weighs the outputs, and the mask, twice: as given."""
    generator = torch.Generator().manual_seed(case["length"] + seed)
    heads, key_heads = case["heads"]
    batch, length, key_length = case["batch"], case["length"], case["key_length"] or case["length"]

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    query, key = draw(batch, heads, length, SIZE), draw(batch, key_heads, key_length, SIZE)
    value = draw(batch, key_heads, key_length, case["value_size"])
    weights = draw(batch, heads, length, case["value_size"])
    bias = None
    if case["bias"] is not None:
        bias = draw(batch if case["bias"][0] else 1, heads if case["bias"][1] else 1, length, key_length)
    mask = given = None
    if case["mask"] == "bool":  # some queries see nothing at all
        mask = draw(batch, 1, length, key_length) > 0.3
    if case["mask"] in ("packed", "rules"):  # causal documents whose ends, and whose padding, differ between samples
        documents = (draw(batch, key_length) > 0.5).cumsum(1)
        sees = documents[:, None, :length, None] == documents[:, None, None, :]
        mask = sees & torch.ones(length, key_length, dtype=torch.bool).tril_()
        for sample in range(batch):
            mask[sample, ..., key_length - sample :] = False
        if case["mask"] == "rules":
            padding = torch.arange(key_length) < key_length - torch.arange(batch)[:, None]
            rule = and_masks(causal_mask_function, packed_sequence_mask_function(documents))
            given = SequenceMask(batch, length, key_length, rule, padding, {})
    if case["mask"] == "heads":  # each sees something else
        mask = draw(batch, heads, length, key_length) > 0.3
    if case["mask"] == "added":
        mask = draw(batch, 1, length, key_length)
    sinks = draw(heads) if case["sinks"] else None
    return query, key, value, bias, sinks, weights, mask, mask if given is None else given


def part_of_bias(case, bias, layout, rank):
    """Return what a rank has of a bias: its heads over all positions, or its positions of all heads."""
    if not case["exchanges_heads"]:
        return layout.take(bias, 2, rank)
    return bias.chunk(case["num_ranks"], 1)[rank] if bias.shape[1] > 1 else bias


def whole_bias(case, parts, layout):
    """Put together gradients of what `part_of_bias` returns."""
    if not case["exchanges_heads"]:
        return layout.put_together(parts, 2)
    return torch.cat(parts, 1) if case["bias"][1] else sum(parts)


def assert_parts_put_together_are_the_whole(case):
    """Attend on threads, and compare outputs and gradients with the definition over the whole sequence."""
    size, exchanges = case["num_ranks"], case["exchanges_heads"]
    if case["mask"] in ("causal", "packed", "rules"):
        case = {**case, "key_length": None}
    if exchanges:
        case = {**case, "heads": (case["heads"][0] * size, case["heads"][1])}
    *whole, weights, mask, given = make(case)
    whole = [None if each is None else each.requires_grad_() for each in whole]
    if whole[3] is not None:
        whole[3].requires_grad_(case["trains_bias"])
    seen = torch.ones(weights.shape[2], weights.shape[2], dtype=torch.bool).tril() if case["mask"] == "causal" else mask
    asked = {name: case[name] for name in ("scaling", "softcap")}
    expected = attention_as_defined(*whole[:3], bias=whole[3], mask=seen, sinks=whole[4], **asked)
    (expected * weights).sum().backward()
    key_length = case["key_length"]
    layout = SequenceLayout(case["length"], size, zigzag=case["zigzag"])
    key_layout = layout if key_length is None else SequenceLayout(key_length, size, zigzag=case["zigzag"])
    layouts = [layout, key_layout, key_layout]
    visibility = Visibility(given, is_causal=case["mask"] == "causal")

    def attend(group):
        local = [place.take(each.detach(), 2, group.rank) for each, place in zip(whole[:3], layouts, strict=True)]
        local = [each.clone().requires_grad_() for each in local]
        bias = None if whole[3] is None else part_of_bias(case, whole[3].detach(), layout, group.rank).clone()
        local.append(None if bias is None else bias.requires_grad_(case["trains_bias"]))
        sinks = None if whole[4] is None else whole[4].detach().clone().requires_grad_()
        call = AttentionCall(
            visibility,
            layout,
            RankGroup(group, group.rank, group.size),
            key_layout=None if key_length is None else key_layout,
            bias=local[3],
            sinks=sinks,
            softcap=case["softcap"],
            scaling=case["scaling"],
        )
        found = (all_to_all_attention if exchanges else ring_attention)(*local[:3], call)
        (found * layout.take(weights, 2, group.rank)).sum().backward()
        return [found.detach(), *(None if each is None else each.grad for each in [*local, sinks])]

    with unittest.mock.patch("booster_hybrid.sequence_parallel.mask.TILE", case["tile"]):
        found, *gradients = zip(*on_threads(size, attend), strict=True)
    torch.testing.assert_close(layout.put_together(found, 2), expected.detach())
    for ours, theirs, place in zip(gradients[:3], whole[:3], layouts, strict=True):
        torch.testing.assert_close(place.put_together(ours, 2), theirs.grad)
    if whole[3] is not None and case["trains_bias"]:
        torch.testing.assert_close(whole_bias(case, gradients[3], layout), whole[3].grad)
    if whole[4] is not None:
        torch.testing.assert_close(sum(gradients[4]), whole[4].grad)


@settings(max_examples=60, deadline=None)
@given(CASES)
# Samples that see different tiles, with biases of their own and of all; a triangle with a bias.
@example({**PLAIN, "mask": "packed", "bias": (True, False), "trains_bias": True})
@example({**PLAIN, "mask": "packed", "bias": (True, False)})
@example({**PLAIN, "mask": "packed", "bias": (False, True), "trains_bias": True})
@example({**PLAIN, "mask": "packed", "bias": (False, True)})
@example({**PLAIN, "mask": "causal", "bias": (False, True)})
# Parts of several lengths; heads with biases, masks and sinks of their own.
@example({**PLAIN, "num_ranks": 6, "length": 13, "mask": "causal", "zigzag": True})
@example({**PLAIN, "num_ranks": 6, "length": 13, "key_length": 7, "mask": "added"})
@example({**PLAIN, "heads": (4, 2), "bias": (True, True), "trains_bias": True, "sinks": True})
@example({**PLAIN, "heads": (3, 3), "num_ranks": 4, "mask": "heads", "zigzag": True})
# Heads of which ranks share keys, or have one each; torch's own kernel, and masks by rules.
@example({**PLAIN, "heads": (2, 1), "bias": (True, True), "trains_bias": True, "sinks": True, "exchanges_heads": True})
@example({**PLAIN, "heads": (3, 3), "num_ranks": 4, "mask": "heads", "exchanges_heads": True})
@example({**PLAIN, "value_size": SIZE, "mask": "causal", "exchanges_heads": True})
@example({**PLAIN, "key_length": 5, "bias": (False, False), "trains_bias": True, "exchanges_heads": True})
@example({**PLAIN, "mask": "rules", "exchanges_heads": True})
@example({**PLAIN, "mask": "rules", "zigzag": True})
def test_parts_put_together_are_attention_over_the_whole(case):
    assert_parts_put_together_are_the_whole(case)


@pytest.mark.parametrize(
    "case",
    [
        {"mask": "rules", "num_ranks": 1},
        {"mask": "rules", "zigzag": True, "sinks": True},
        {"mask": "rules", "num_ranks": 3, "heads": (4, 2)},
        {"mask": "heads", "num_ranks": 1, "sinks": True},
        {"mask": "heads", "heads": (3, 3), "zigzag": True},
        {"mask": "bool"},
    ],
    ids=str,
)
def test_rules_by_flex_attention_give_what_whole_masks_give(case):
    with flex_on_cpus() as calls:
        assert_parts_put_together_are_the_whole({**PLAIN, "value_size": SIZE, **case})
    # One rank's backward is the kernel's; of several, each visit is attended again.
    size = case.get("num_ranks", 2)
    assert len(calls) == (1 if size == 1 else 2 * size**2)


def test_other_documents_compile_nothing_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    place, case = RankGroup(None, 0, 1), {**PLAIN, "value_size": SIZE, "mask": "rules"}
    counts = []
    with flex_on_cpus(lambda function: torch.compile(function, backend=counter)):
        for seed in range(3):
            *whole, _, _, _, dense, rules = make(case, seed)
            call = AttentionCall(Visibility(rules, is_causal=False), SequenceLayout(case["length"], 1), place)
            found = ring_attention(*(each.requires_grad_() for each in whole), call)
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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_keys_and_gradients_are_sent_once_less_than_there_are_ranks(monkeypatch, num_ranks):
    exchange = unittest.mock.Mock(wraps=collectives.all_to_all)
    monkeypatch.setattr(collectives, "all_to_all", exchange)
    layout = SequenceLayout(8, num_ranks)

    def attend(group):
        inputs = [torch.randn(1, 2, layout.lengths[group.rank], SIZE, requires_grad=True) for _ in range(3)]
        place = RankGroup(group, group.rank, group.size)
        ring_attention(*inputs, AttentionCall(Visibility(None, is_causal=False), layout, place)).sum().backward()

    on_threads(num_ranks, attend)
    # Keys in both passes, and the gradients of keys.
    assert exchange.call_count == 3 * (num_ranks - 1) * num_ranks
    all_keys = sum(2 * layout.lengths[rank] * SIZE * 2 for rank in range(num_ranks))
    assert sum(call.args[0].numel() for call in exchange.call_args_list) == 3 * (num_ranks - 1) * all_keys


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"softcap": 1.0}, {"bias": False}, {"bias": True}, {}], ids=str)
def test_scores_are_computed_in_tiles_and_explicitly_only_where_no_kernel_does(monkeypatch, options):
    length, tile, calls = 8, 2, []
    for kernel in (ExplicitScores, FusedKernel):

        def forward(self, query, key, *rest, kernel=kernel, original=kernel.forward):
            calls.append((kernel, query.shape[2], key.shape[2]))
            return original(self, query, key, *rest)

        monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr("booster_hybrid.sequence_parallel.mask.TILE", tile)
    inputs = torch.randn(1, 1, length, SIZE)
    bias = torch.randn(1, 1, length, length, requires_grad=options["bias"]) if "bias" in options else None
    rest = {name: value for name, value in options.items() if name != "bias"}

    def attend(group):
        place, visibility = RankGroup(group, 0, 1), Visibility(None, is_causal=False)
        call = AttentionCall(visibility, SequenceLayout(length, 1), place, bias=bias, **rest)
        ring_attention(inputs, inputs, inputs, call)

    on_threads(1, attend)
    is_explicit, is_cut = bool(rest) or options.get("bias", False), bool(options)
    expected = (ExplicitScores if is_explicit else FusedKernel, *([tile] * 2 if is_cut else [length] * 2))
    assert set(calls) == {expected}


def test_scores_of_any_size_do_not_overflow():
    """The largest score may come first, last or in between: each correction is by a power that is at most one."""
    length, size = 6, 3
    layout = SequenceLayout(length, size)
    value = torch.randn(1, 1, length, VALUE_SIZE, generator=torch.Generator().manual_seed(0))
    for peak in range(length):
        key = torch.zeros(1, 1, length, 1)
        key[0, 0, peak] = 1.0

        def attend(group, key=key):
            place = RankGroup(group, group.rank, group.size)
            query = torch.full((1, 1, layout.lengths[group.rank], 1), 1e30)
            local = [layout.take(each, 2, group.rank) for each in (key, value)]
            call = AttentionCall(Visibility(None, is_causal=False), layout, place, scaling=1.0)
            return ring_attention(query, *local, call)

        for found in on_threads(size, attend):
            assert torch.equal(found, value[:, :, peak : peak + 1].expand_as(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_narrow_inputs_lose_as_little_as_one_kernel_does(dtype, is_causal):
    def attended(attend, inputs, weights):
        """Return outputs and gradients, in fp32."""
        inputs = [each.clone().requires_grad_() for each in inputs]
        found = attend(*inputs)
        found.backward(weights)
        return [found.detach().float(), *(each.grad.float() for each in inputs)]

    length, size = 66, 3
    layout = SequenceLayout(length, size, zigzag=True)
    generator = torch.Generator().manual_seed(0)
    *whole, weights = (torch.randn(2, 4, length, 16, generator=generator).to(dtype) for _ in range(4))

    def attend(group):
        place = RankGroup(group, group.rank, group.size)

        def ring(*inputs):
            outputs = ring_attention(*inputs, AttentionCall(Visibility(None, is_causal=is_causal), layout, place))
            assert outputs.dtype == dtype
            return outputs

        *local, local_weights = (layout.take(each, 2, group.rank) for each in (*whole, weights))
        return attended(ring, local, local_weights)

    found = [layout.put_together(parts, 2) for parts in zip(*on_threads(size, attend), strict=True)]

    def one_kernel(*inputs):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)

    truth = attended(one_kernel, [each.double() for each in whole], weights.double())
    of_one = attended(one_kernel, whole, weights)
    for ours, theirs, exact in zip(found, of_one, truth, strict=True):
        # Each block's share is rounded to the inputs' format, then summed in fp32.
        assert float((ours - exact).norm()) < 1.5 * float((theirs - exact).norm())


@pytest.mark.parametrize("zigzag", [False, True])
def test_dropped_weights_are_the_same_in_backward_and_differ_between_blocks(zigzag):
    """With an identity for values, outputs are the weights: dropped ones are zero, the others grow."""
    length, size, dropout = 64, 2, 0.25
    layout = SequenceLayout(length, size, zigzag=zigzag)
    key = torch.zeros(1, 2, length, SIZE)
    value = torch.eye(length).expand(1, 2, -1, -1)
    torch.manual_seed(0)

    def attend(group):
        local = [layout.take(each, 2, group.rank).clone().requires_grad_() for each in (key, key, value)]
        place = RankGroup(group, group.rank, group.size)
        call = AttentionCall(Visibility(None, is_causal=False), layout, place, dropout=dropout)
        weights = ring_attention(*local, call) * length
        weights.sum().backward()
        return weights.detach(), local[2].grad

    found, gradients = zip(*on_threads(size, attend), strict=True)
    weights = layout.put_together(found, 2)
    kept = weights != 0
    assert float(kept.float().mean()) == pytest.approx(1 - dropout, abs=0.02)
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / (1 - dropout)))
    # The gradient of a value is what its column's weights sum up to, over all queries.
    columns = weights.sum(2).unsqueeze(-1).expand(-1, -1, -1, length)
    torch.testing.assert_close(layout.put_together(gradients, 2), columns)
    cuts = [slice(start, start + length // 4) for start in range(0, length, length // 4)]
    blocks = [kept[:, head, rows, columns] for head in range(2) for rows in cuts for columns in cuts]
    alike = [(i, j) for i in range(len(blocks)) for j in range(i) if torch.equal(blocks[i], blocks[j])]
    assert not alike, "each block of each head drops other weights"
