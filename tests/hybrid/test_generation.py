"""``generate`` of models that are split over ranks returns the tokens of one process, on every rank of a replica."""

import contextlib

import pytest
import torch
from hybrid_runs import RING, SPLIT_GATHER, ULYSSES
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from t5_sequences import REFUSED as T5_REFUSED
from t5_sequences import is_refused
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_testing.models import tiny_llama

PROMPT = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
DRAWN = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
SETTINGS = {"tp2": {"tp_size": 2}, "split_gather": SPLIT_GATHER, "ulysses": ULYSSES, "ring": RING}


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
    return tiny_llama(**sizes, initializer_range=0.3, eos_token_id=1, use_cache=True).eval()


def boosted(options, model=None):
    model, *_ = Booster(plugin=HybridParallelPlugin(**options)).boost(model or llama())
    return model.eval()


def greedy(model):
    mask = torch.ones_like(PROMPT)
    return [model.generate(PROMPT, attention_mask=mask, num_beams=beams, **GREEDY).tolist() for beams in (1, 3)]


@matrix(["tp2", "split_gather", "ulysses"], name=SETTINGS)
@on_ranks(2)
def test_tokens_are_those_of_one_process(name):
    assert greedy(boosted(SETTINGS[name])) == greedy(llama())


@matrix(["tp2"], name=["tp2", "ring"])
@on_ranks(2)
def test_ranks_of_a_replica_draw_the_same_tokens_whatever_their_seeds(name):
    def drawn(model, seed):
        torch.manual_seed(seed)
        return [model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **DRAWN).tolist() for _ in range(2)]

    first, second = drawn(llama(), 5)
    assert first != second
    rank = torch.distributed.get_rank()
    assert drawn(boosted(SETTINGS[name]), 5 + rank) == [first, second]
    if rank == 1:  # whose own stream is where it was
        after = torch.rand(())
        torch.manual_seed(6)
        assert after == torch.rand(())


@on_ranks(4)
def test_replicas_may_generate_texts_of_other_lengths():
    model, plain = boosted({**SETTINGS["ring"], "zero_stage": 3}), llama()
    replica = torch.distributed.get_rank() // 2
    prompt = PROMPT[:, : 3 + replica]
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0  # texts without padding need no mask
    named = {"max_new_tokens": 3 + 2 * replica, "do_sample": False, "pad_token_id": 0}
    for each in (model, plain):
        each.generation_config.eos_token_id = None
    assert torch.equal(*(each.generate(prompt, attention_mask=mask, **named) for each in (model, plain)))


@matrix(["tp2"], name=["tp2", "split_gather", "ulysses", "ring"])
@on_ranks(2)
def test_encoder_decoder_models_generate(name):
    def t5():
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 128}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, initializer_factor=3.0)).eval()

    given = {"attention_mask": torch.ones_like(PROMPT), "decoder_input_ids": torch.tensor([[0, 5], [0, 6]]), **GREEDY}
    refuses = is_refused("t5", SETTINGS[name])
    with pytest.raises(ConfigError, match=T5_REFUSED) if refuses else contextlib.nullcontext():
        assert torch.equal(boosted(SETTINGS[name], t5()).generate(PROMPT, **given), t5().generate(PROMPT, **given))


@raises_on_ranks(ConfigError, "cut into pipeline stages, through which `generate` does not run", 2)
def test_models_that_are_cut_into_stages_do_not_generate():
    boosted({"pp_size": 2}).generate(PROMPT)


OTHERS = {"length": {"max_new_tokens": 9}, "other cache": {"use_cache": True}}
"""What the second rank has otherwise."""
APART = "in `generate`. These ranks generate one text together"
REFUSED = {
    "ulysses-cache": "Leave out `use_cache`",
    "ring-prompt": "were given different ones",
    "tp2-prompt": "were given different ones",
    "ring-too short": r"sequences of 1 position\(s\), which can't be split over 2 ranks",
    "tp2-clock": "`max_time` ends the loop by a clock",
    "tp2-length": rf"`max_new_tokens`: 6 on rank 0, 9 on rank 1.*{APART}",
    "ring-other cache": rf"`use_cache`: .*{APART}",
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_can_not_be_generated_is_refused_on_every_rank(case):
    name, kind = case.split("-")
    model, rank, prompt, named = boosted(SETTINGS[name]), torch.distributed.get_rank(), PROMPT, {**GREEDY}
    if kind == "prompt":
        prompt = PROMPT[:, : 7 - rank]
    elif kind == "too short":
        prompt = PROMPT[:, :1]
    elif kind == "cache":
        named["use_cache"] = True
    elif kind == "clock":
        named["max_time"] = 100.0
    elif rank:
        named.update(OTHERS[kind])
    with pytest.raises(ConfigError, match=REFUSED[case]):
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **named)


@on_ranks(2)
def test_what_each_rank_made_for_itself_is_the_same_option():
    """What is made apart on each rank, and what shows the tokens of one, is no difference."""
    from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor, TextStreamer

    class Shown(TextStreamer):
        def __init__(self):
            self.count = 0

        def put(self, value):
            self.count += 1

        def end(self):
            pass

    model = boosted({"tp_size": 2})
    streamer = Shown() if torch.distributed.get_rank() == 0 else None
    processors = LogitsProcessorList([MinLengthLogitsProcessor(9, eos_token_id=torch.tensor([1]))])
    mask = torch.ones_like(PROMPT[:1])
    own = {"max_new_tokens": 6, "pad_token_id": 0, "logits_processor": processors, "streamer": streamer}
    model.generate(PROMPT[:1], attention_mask=mask, **own)
    if streamer is not None:
        assert streamer.count == 1 + 6  # the prompt, and each token
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    assert model.generate(PROMPT[:1], config, attention_mask=mask).shape[1] == PROMPT.shape[1] + 4


@on_ranks(2)
def test_other_arguments_of_a_loop_of_the_users_own_are_refused():
    class Bigram(nn.Module):
        """A model with a loop of its own, which passes positional arguments and returns a tuple."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, 16)
            self.head = nn.Linear(16, 16)

        def forward(self, tokens, scale):
            return self.head(self.table(tokens)) * scale, "a note"

        @torch.no_grad()
        def generate(self, tokens, count):
            for _ in range(count):
                logits, note = self(tokens, 2.0)
                assert note == "a note"
                tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
            return tokens

    torch.manual_seed(0)
    policy = ShardingPolicy(rules=(ModuleRule("head", Style.COLUMN_GATHER),))
    model = boosted({"tp_size": 2, "custom_policy": policy, "example_batch": (PROMPT, 2.0)}, Bigram())
    with pytest.raises(ConfigError, match="`count`: 5 on rank 0, 6 on rank 1"):
        model.generate(PROMPT, 5 + torch.distributed.get_rank())
