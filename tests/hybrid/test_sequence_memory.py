"""Long sequences: no rank has a tensor of all pairs of positions, nor keeps whole sequences for backward."""

import contextlib

import torch
from isolated_libraries import import_quietly
from matrix import matrix
from ranked import on_ranks
from torch.profiler import ProfilerActivity, profile

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.mask import Visibility, make_mask
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention
from booster_testing.models import tiny_llama

MODES = {"all_to_all": all_to_all_attention, "ring_attn": ring_attention}


@contextlib.contextmanager
def peak_allocated():
    """Yield a list that gets the most bytes of tensors above those at the start, exactly, as torch's allocator says.

    The kernel's view includes what malloc keeps.
    """
    peaks, held = [], 0
    # Without `acc_events`, torch 2.10 warns that a second cycle would drop the events of the first.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield peaks
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peaks[:] = [max(held, *peaks, 0)]


@matrix(["all_to_all"], mode=MODES)
@on_ranks(2)
def test_masks_of_many_positions_take_no_memory_of_their_square(mode):
    """Attend with two samples, whose padding or documents differ; `test_ring_attention` compares what is computed."""
    import_quietly(("transformers",))
    from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

    length, size = 3000, 8
    positions = torch.arange(length)
    starts = torch.tensor([[length // 3, length // 2 + 7], [length // 7, length]])
    documents = (positions >= starts[..., None]).sum(1)
    packed = and_masks(causal_mask_function, packed_sequence_mask_function(documents))
    padding = torch.stack([positions >= length // 5, positions < length - length // 3])
    masks = {
        "padded": make_mask(2, length, length, attention_mask=padding),
        "packed": make_mask(2, length, length, mask_function=packed),
        "plain": None,
    }
    group = RankGroup.of(None)
    layout = SequenceLayout(length, group.size, zigzag=mode == "ring_attn")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, length, size, generator=generator) for heads in (4, 2, 2)]
    for kind, mask in masks.items():
        local = [layout.take(each, 2, group.rank).clone().requires_grad_() for each in whole]
        visibility = Visibility(mask, is_causal=kind == "plain")
        with peak_allocated() as used:
            found = MODES[mode](*local, AttentionCall(visibility, layout, group))
            torch.autograd.grad(found, local, torch.ones_like(found))
        # All pairs of positions of both samples would be 17 MiB as bools, and 69 MiB as what is added to scores.
        assert used[0] < 12 * 2**20, f"{kind}: {used[0] / 2**20:.1f} MiB"


def saved_by_layers(model):
    """Return the bytes that the layers of a Llama keep for backward, without those of parameters."""
    storages, inside = {}, []
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    for layer in model.modules():
        if type(layer).__name__ == "LlamaDecoderLayer":
            layer.register_forward_pre_hook(lambda *_: inside.append(True), prepend=True)
            layer.register_forward_hook(lambda *_: inside.pop() and None)

    def note(tensor):
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.requires_grad
    return sum(each.nbytes() for each in storages.values())


@matrix(["2"], size=[2, 4])
@on_ranks("size")
def test_layers_between_which_sequences_are_split_keep_a_ranks_share_for_backward(size):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    plugin = HybridParallelPlugin(tp_size=size, sequence_parallelism_mode="split_gather")
    split = Booster("cpu", plugin=plugin).boost(tiny_llama(**sizes), None)[0]
    assert saved_by_layers(split) <= 1.1 * saved_by_layers(tiny_llama(**sizes)) / size
