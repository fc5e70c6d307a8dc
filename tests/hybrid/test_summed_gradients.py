"""Parameters of whose gradient each tensor parallel rank computes a part: norms of heads, keys that ranks share."""

import torch
from compiler_warnings import ignore_compiler_warnings
from hybrid_runs import boosted
from matrix import matrix
from ranked import on_ranks

from booster_runtime import full_gradient

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
MODES = {"tp": {}, "split_gather": {"sequence_parallelism_mode": "split_gather"}}


def make(name):
    """Return a model with one key/value head, or with norms of each head."""
    import transformers

    torch.manual_seed(0)
    kind, heads = {"shared keys": ("Llama", 1), "norms of heads": ("Qwen3", 4)}[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_key_value_heads=heads, head_dim=4)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def train(name, options, *, penalty=0.0, is_frozen=False, backend=None):
    """Compare gradients with one process, of a loss with a penalty on what every rank has whole, or shares."""
    whole, model = make(name), make(name)
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    shared = ("norm", "k_proj") if name == "shared keys" else ("norm",)

    def loss_of(model):
        inner = [each for key, each in model.named_parameters() if any(part in key for part in shared)]
        return model(input_ids=tokens, labels=tokens).loss + penalty * sum(each.square().sum() for each in inner)

    loss_of(whole).backward()
    model.requires_grad_(not is_frozen)
    if backend is not None:
        ignore_compiler_warnings()
        model.model.layers[0].self_attn.k_proj.compile(backend=backend)
    booster, model, optimizer = boosted(model, tp_size=2, **options)
    for each in model.parameters():
        each.requires_grad_(True)
    booster.backward(loss_of(model), optimizer)
    for key, parameter in whole.named_parameters():
        found = full_gradient(booster, model, key)
        torch.testing.assert_close(
            found, parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@matrix(1, name=["shared keys", "norms of heads"], mode=MODES)
@on_ranks(2)
def test_what_was_frozen_at_boost_may_be_trained_later(name, mode):
    train(name, MODES[mode], is_frozen=True)


@matrix(1, name=["shared keys", "norms of heads"], mode=MODES)
@on_ranks(2)
def test_a_penalty_on_weights_counts_once(name, mode):
    train(name, MODES[mode], penalty=0.3)


@on_ranks(2, timeout_seconds=300)
def test_a_compiled_layer_adds_up_what_each_rank_has_of_shared_keys():
    train("shared keys", {}, backend="aot_eager")
