"""Parameters of whose gradient each tensor parallel rank computes a part: norms of heads, keys that ranks share."""

import torch
from compiler_warnings import ignore_compiler_warnings
from hybrid_runs import boosted
from matrix import matrix

from booster_runtime import full_gradient
from booster_testing import run_on_ranks

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
MODES = {"tp": {}, "split_gather": {"sequence_parallelism_mode": "split_gather"}}


def make(name):
    """Return a model with one key/value head, or with norms of each head."""
    import transformers

    torch.manual_seed(0)
    kind, heads = {"shared keys": ("Llama", 1), "norms of heads": ("Qwen3", 4)}[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_key_value_heads=heads, head_dim=4)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch():
    ids = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def loss_of(model, penalty):
    """Return a loss with a penalty on what every rank has whole, or shares."""
    loss = model(**batch()).loss
    shared = "k_proj" if model.config.num_key_value_heads == 1 else "norm"
    inner = [each for name, each in model.named_parameters() if "norm" in name or shared in name]
    return loss + penalty * sum(each.square().sum() for each in inner)


def train(name, options, penalty, is_frozen, backend=None):
    whole, model = make(name), make(name)
    loss_of(whole, penalty).backward()
    model.requires_grad_(not is_frozen)
    if backend is not None:
        ignore_compiler_warnings()
        model.model.layers[0].self_attn.k_proj.compile(backend=backend)
    booster, model, optimizer = boosted(model, tp_size=2, **options)
    for each in model.parameters():
        each.requires_grad_(True)
    booster.backward(loss_of(model, penalty), optimizer)
    for key, parameter in whole.named_parameters():
        found = full_gradient(booster, model, key)
        torch.testing.assert_close(
            found, parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@matrix(1, name=["shared keys", "norms of heads"], mode=MODES)
def test_what_was_frozen_at_boost_may_be_trained_later(name, mode):
    run_on_ranks(train, 2, name, MODES[mode], 0.0, True)


@matrix(1, name=["shared keys", "norms of heads"], mode=MODES)
def test_a_penalty_on_weights_counts_once(name, mode):
    run_on_ranks(train, 2, name, MODES[mode], 0.3, False)


def test_a_compiled_layer_adds_up_what_each_rank_has_of_shared_keys():
    run_on_ranks(train, 2, "shared keys", {}, 0.0, False, "aot_eager", timeout_seconds=300)
