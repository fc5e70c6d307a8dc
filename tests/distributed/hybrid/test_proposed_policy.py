"""`booster policy`: proposed rules split what they can, train as one process does, and the rest is named."""

from __future__ import annotations

import pytest
import torch
from model_zoo.transformers_build import from_config
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as the docs of torch call it

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_hybrid.proposing.proposal import propose
from booster_testing import run_on_ranks
from booster_tools import verify

WIDTH, HEADS, WORDS = 24, 4, 50


class Block(nn.Module):
    """A transformer block with a fused projection, and a feed-forward without names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Interleaved(Block):
    """Queries, keys and values of each head are adjacent."""

    def forward(self, x):
        fused = self.qkv(self.norm(x)).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*fused.unbind(3), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def interleaved():
    model = Plain()
    model.blocks = nn.ModuleList(Interleaved() for _ in range(2))
    return model


_GPT_NEO = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": 32,
    "intermediate_size": 64,
    "use_cache": False,
}
_GROUPED = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
MODELS = {
    "plain": Plain,
    "interleaved": interleaved,
    "gpt_neo": from_config("GPTNeoConfig", "GPTNeoForCausalLM", **_GPT_NEO),
    "qwen3": from_config("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **_GROUPED),
}


def batch():
    tokens = torch.randint(3, WORDS, (4, 10), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def build(name):
    model = MODELS[name]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)


def train(name, code):
    """Verify the policy that some code defines."""
    found = {}
    exec(code, found)
    plugin = HybridParallelPlugin(tp_size=2, custom_policy=found["policy"])
    return str(verify(lambda: build(name), plugin, batch()).unexplained)


def test_rules_of_a_plain_model():
    proposal = propose(Plain(), batch())
    assert proposal.policy == ShardingPolicy(
        rules=(
            ModuleRule("blocks.*.qkv", Style.COLUMN, units="num_heads", num_blocks=3, scaled=("num_heads",)),
            ModuleRule("blocks.*.out", Style.ROW, units="num_heads"),
            ModuleRule("blocks.*.mlp.1", Style.COLUMN),
            ModuleRule("blocks.*.mlp.3", Style.ROW),
            ModuleRule("tokens", Style.VOCABULARY),
            ModuleRule("head", Style.HEAD),
        ),
        layers=("blocks",),
    )
    assert proposal.whole == {"positions": "an embedding whose rows are not those of the head"}


@pytest.mark.parametrize("name", MODELS)
def test_a_proposed_policy_trains_as_one_process_does(name):
    proposal = propose(build(name)[0], batch())
    styles = [rule.style for rule in proposal.policy.rules]
    assert styles.count(Style.ROW) == 2, proposal.whole
    assert run_on_ranks(train, 2, name, proposal.code) == ["()"] * 2


class Normalized(Block):
    """Queries are normalized over all heads, which no split of them computes."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(3 * WIDTH)

    def forward(self, x):
        fused = self.query_norm(self.qkv(self.norm(x)))
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in fused.chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def test_what_can_not_be_placed_is_named():
    model = Plain()
    model.blocks = nn.ModuleList(Normalized() for _ in range(2))
    proposal = propose(model, batch())
    assert {rule.pattern for rule in proposal.policy.rules} >= {"blocks.*.mlp.1", "blocks.*.mlp.3"}
    assert {"blocks.*.qkv", "blocks.*.out"} <= proposal.whole.keys()


def test_a_model_without_pairs_is_refused():
    with pytest.raises(ConfigError, match=r"No linear layers of Linear could be split"):
        propose(nn.Linear(3, 3), torch.ones(2, 3))
