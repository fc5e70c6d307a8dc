"""GPTs as people write them by hand, who take every width from their input and count heads themselves.

`FusedGPT` has the form of nanoGPT, `MaskedGPT` that of minGPT: their attention splits one projection by a width that it
stores, divides the width of its input by the number of heads, and views its outputs as wide as its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from booster_hybrid import ModuleRule, ShardingPolicy, Style


@dataclass
class Config:
    block_size: int = 24
    vocab_size: int = 66
    n_layer: int = 2
    n_head: int = 6
    n_embd: int = 48
    dropout: float = 0.0
    bias: bool = True


class Attention(nn.Module):
    """Causal attention; with a mask in a buffer it multiplies by hand, else it calls torch's function."""

    recomputes = False

    def __init__(self, config, *, has_mask):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout, self.has_mask = config.n_head, config.n_embd, config.dropout, has_mask
        if has_mask:
            size = config.block_size
            self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806 - as they are called there
        fused = checkpoint(self.c_attn, x, use_reentrant=False) if self.recomputes else self.c_attn(x)
        q, k, v = fused.split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.has_mask:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        else:
            dropout = self.dropout if self.training else 0
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class FusedBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias), nn.LayerNorm(config.n_embd)
        self.attn = Attention(config, has_mask=False)
        self.mlp = nn.Sequential()
        self.mlp.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.mlp.gelu = nn.GELU()
        self.mlp.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.mlp.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class MaskedBlock(nn.Module):
    """Its feed-forward is a closure over modules in a dictionary."""

    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = Attention(config, has_mask=True)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
            "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
            "act": nn.GELU(approximate="tanh"),
            "dropout": nn.Dropout(config.dropout),
        })  # fmt: skip
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class FusedGPT(nn.Module):
    block = FusedBlock
    is_tied = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList([self.block(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if self.is_tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.02)  # zeros would not show how often they are added

    def forward(self, idx, targets=None):
        _, t = idx.size()
        assert t <= self.config.block_size, f"Cannot forward a sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class MaskedGPT(FusedGPT):
    block = MaskedBlock
    is_tied = False


MODELS = {"nanogpt": FusedGPT, "mingpt": MaskedGPT}


def policy(**of_attention):
    """Return the rules of both, those of the fused projection with further fields."""
    fields = {"scaled": ("n_head", "n_embd"), "local_width": True} | of_attention
    layer = "transformer.h.*"
    return ShardingPolicy(
        rules=(
            ModuleRule(f"{layer}.attn.c_attn", Style.COLUMN, units="n_head", num_blocks=3, **fields),
            ModuleRule(f"{layer}.attn.c_proj", Style.ROW, units="n_head"),
            ModuleRule(f"{layer}.mlp.c_fc", Style.COLUMN),
            ModuleRule(f"{layer}.mlp.c_proj", Style.ROW),
            ModuleRule("transformer.wte", Style.VOCABULARY),
            ModuleRule("lm_head", Style.HEAD),
        ),
        layers=("transformer.h",),
    )


def batch(number, replica):
    """Return a replica's samples, as a `Case` asks for them."""
    ids = torch.randint(66, (4, 17), generator=torch.Generator().manual_seed(10 * number + replica))
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def loss_of(outputs, _batch):
    return outputs[1]
