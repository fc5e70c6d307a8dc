"""Dropout under tensor parallelism: replicas drop alike, split regions do not, nor do axes inside of each other."""

import pytest
import torch
import torch.distributed as dist
from isolated_libraries import import_quietly
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.random_streams import Stream

PROBABILITY = 0.3


@on_ranks(2)
def test_dropout_differs_between_head_shards_and_matches_on_replicas():
    import_quietly(("transformers",))
    from transformers import GPT2Config, GPT2LMHeadModel

    def overlap(one, other):
        """Return how much of what one drops the other drops too."""
        return float((one & other).sum() / one.sum())

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "use_cache": False}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), PROBABILITY)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **rates, attn_implementation="eager")).train()
    model = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).boost(gpt2).model
    masks = {}
    for name, module in model.unwrap().named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, args, output, name=name: masks.update({name: (output == 0) & (args[0] != 0)})
            )
    torch.manual_seed(dist.get_rank())  # a user's own choice, which must not part the replicas
    tokens = torch.randint(3, 64, (4, 48), generator=torch.Generator().manual_seed(0))
    for index, attention in enumerate(model(input_ids=tokens, output_attentions=True).attentions):
        masks[f"attention {index}"] = (attention == 0)[(..., *torch.tril_indices(48, 48))]
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, masks)
    first, second = of_ranks
    split = [name for name in first if name.startswith("attention")]
    assert len(split) == 2
    for name, mask in first.items():
        if name in split:
            # Of 4 * 2 * 1176 draws, a third of which dropped, the mean has a deviation of 0.009.
            assert overlap(mask, second[name]) == pytest.approx(PROBABILITY, abs=0.04)
            assert float(mask.float().mean()) == pytest.approx(PROBABILITY, abs=0.03)
        else:
            assert torch.equal(mask, second[name]), name
    # No stream comes twice: not in another layer, and not after a region as in it.
    assert overlap(first[split[0]], first[split[1]]) == pytest.approx(PROBABILITY, abs=0.04)
    residual = [mask for name, mask in first.items() if "resid" in name or name.endswith("mlp.dropout")]
    for index, mask in enumerate(residual):
        for other in residual[index + 1 :]:
            assert overlap(mask, other) == pytest.approx(PROBABILITY, abs=0.035)


def test_streams_of_two_axes_differ_inside_of_each_other():
    """The ranks are those of two times two, seeded alike; what they draw afterwards is alike again."""

    def drawn():
        return float(torch.rand((), dtype=torch.float64))

    of_outer, of_inner, after = [], [], []
    with torch.random.fork_rng(devices=[]):
        for rank in range(4):
            torch.manual_seed(4)
            outer, inner = Stream(rank // 2), Stream(rank % 2)
            outer.enter(torch.device("cpu"))
            first = drawn()
            inner.enter(torch.device("cpu"))
            of_inner.append(drawn())
            assert inner.is_current
            inner.leave()
            assert outer.is_current
            of_outer.append((first, drawn()))
            outer.leave()
            after.append(drawn())
    assert of_outer[0] == of_outer[1]
    assert of_outer[2] == of_outer[3]
    assert len({*of_outer}) == 2
    assert len({*of_inner}) == 4
    assert len({*after}) == 1
