"""At the peak of a training step, a rank of tensor or pipeline parallelism holds its share of what one process holds.

Measured is all anonymous memory that the kernel counts, between what was there before the model was built and the peak
of a step in which AdamW's state is there already: parameters, gradients, two moments, gradients on their way from
autograd, buffers of collectives, activations, and what the C library keeps of what was freed within the step. Of three
steps the least counts: holes in what is allocated only add. That is fair where what is not split is small: the batch
has 8 tokens, norms have 512 elements, and a pipeline's layers, whose gradients come into being one at a time and whole,
are a twentieth of the model.
"""

import functools

import pytest
import torch

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import peak_memory, run_on_ranks
from booster_testing.models import tiny_llama

WARMUP, MEASURED = 2, 3


def llama(hidden, layers, vocabulary=256):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, **heads}
    return tiny_llama(vocab_size=vocabulary, **sizes)


def training(model, options):
    """Return what takes a step."""
    booster = Booster("cpu", "fp32", HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    tokens = torch.arange(8).view(4, 2)
    batch = {"input_ids": tokens, "labels": tokens}

    def step():
        if options.get("pp_size", 1) > 1:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_of_a_step(sizes, options):
    """Return the peak of a step above what was there before the model, and the bytes of the parameters here."""
    step = training(llama(sizes[0], 4), options)  # what torch, imports and the process groups take once
    for _ in range(WARMUP):
        step()
    del step
    with peak_memory() as before:
        model = llama(*sizes)
        step = training(model, options)
        for _ in range(WARMUP):
            step()
    peaks = []
    for _ in range(MEASURED):
        with peak_memory() as trained:
            step()
        peaks.append(trained.start_bytes - before.start_bytes + trained.peak_bytes)
    here = sum(parameter.numel() * 4 for parameter in model.parameters())
    return min(peaks), here


@functools.cache
def of_one_process(sizes):
    """Return what `peak_of_a_step` does on one rank."""
    ((whole, all_bytes),) = run_on_ranks(peak_of_a_step, 1, sizes, {}, timeout_seconds=120)
    return whole, all_bytes


SIZES = (512, 24)
"""Hidden size and number of layers: 63 million parameters, against which what C and Python keep is small."""


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("tp", "pp")], ids="-".join)
def test_the_peak_is_a_share_of_that_of_one_process(axes):
    whole, all_bytes = of_one_process(SIZES)
    assert whole == pytest.approx(4 * all_bytes, rel=0.05), "parameters, gradients and two moments, each once"
    num_ranks, options = 2 ** len(axes), {f"{axis}_size": 2 for axis in axes}
    for peak, here in run_on_ranks(peak_of_a_step, num_ranks, SIZES, options, timeout_seconds=120):
        assert here == pytest.approx(all_bytes / num_ranks, rel=0.01)
        assert peak == pytest.approx(4 * here + whole - 4 * all_bytes, rel=0.05), "the rest is that of one process"
