"""Dropout under tensor parallelism: replicas drop alike, split regions do not, and recomputing drops again the same."""

import pytest
import torch
import torch.distributed as dist
from isolated_libraries import import_quietly

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks

PROBABILITY = 0.3


def gpt2(**changes):
    import_quietly(("transformers",))
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "use_cache": False}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), PROBABILITY)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **rates, **changes}, attn_implementation="eager")).train()


def boosted(make, *, sgd=False):
    original = make()
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1) if sgd else torch.optim.AdamW(original.parameters())
    booster = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2))
    model, optimizer, *_ = booster.boost(original, optimizer)
    return booster, model, optimizer


def tokens(step=0):
    return torch.randint(3, 64, (4, 48), generator=torch.Generator().manual_seed(step))


def masks():
    """Return which values each dropout of a model dropped, by name, in the order of its calls."""
    booster, model, optimizer = boosted(gpt2)
    del booster, optimizer
    torch.manual_seed(dist.get_rank())  # a user's own choice, which must not part the replicas
    seen = {}

    def watch(name):
        def hook(_module, args, output):
            seen[name] = (output == 0) & (args[0] != 0)

        return hook

    for name, module in model.unwrap().named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(watch(name))
    for index, attention in enumerate(model(input_ids=tokens(), output_attentions=True).attentions):
        seen[f"attention {index}"] = (attention == 0)[(..., *torch.tril_indices(48, 48))]
    return seen


def overlap(one, other):
    """Return how much of what one drops the other drops too."""
    return float((one & other).sum() / one.sum())


def test_dropout_differs_between_head_shards_and_matches_on_replicas():
    first, second = run_on_ranks(masks, 2)
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
