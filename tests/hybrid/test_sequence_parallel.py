"""Sequences split over ranks: models train as one process does, whatever the mode, the mesh and the lengths."""

import functools

import pytest
import torch
import torch.distributed as dist
from cases import Setting, assert_equals_one_process, decayed, own_loss, zoo_case
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks

TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
"""fp32, sums in another order; AdamW's epsilon keeps small gradients' rounding small."""
ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
SPLIT = {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}
MODES = pytest.mark.parametrize("options", [ULYSSES, RING, SPLIT], ids=["all_to_all", "ring_attn", "split_gather"])


def batch_of(step, length, padding):
    """Return whole sequences, of which the first third and what is padded don't count: more of them in some samples."""
    tokens = torch.randint(3, 64, (4, length), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, : length // 3] = -100
    if padding is not None:
        batch["attention_mask"] = torch.ones_like(tokens)
        for sample in range(4):
            hidden = 1 + sample % 3
            batch["attention_mask"][sample, slice(-hidden, None) if padding == "right" else slice(0, hidden)] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def share_of(length, padding, step, replica):
    return {key: value[replica::2] for key, value in batch_of(step, length, padding).items()}


def llama_case(length, padding, name="transformers/llama", **changes):
    return zoo_case(name, batch=functools.partial(share_of, length, padding), loss=own_loss, **changes)


def boosted(name, options, precision="fp32"):
    booster = Booster(plugin=HybridParallelPlugin(**options), mixed_precision=precision)
    model = get_model(name).seeded()
    return booster, *booster.boost(model, decayed(model))[:2]


# every length in every mode; with whole logits or split ones in turn
@matrix(
    ["9-right-False-all_to_all", "2-None-True-all_to_all"],
    **{
        "length, padding": [
            (7, "left"),
            (9, "right"),
            (2, None),
            *(pytest.param(each, None, marks=pytest.mark.slow) for each in (3, 8)),
        ]
    },
    parallel_output=[False, True],
    options=named([ULYSSES, RING, SPLIT], ["all_to_all", "ring_attn", "split_gather"]),
)
def test_sequences_of_any_length_padded_or_not_train_as_on_one_process(options, parallel_output, length, padding):
    setting = Setting(HybridParallelPlugin, {**options, "parallel_output": parallel_output})
    # the first of two positions, which alone has a loss, attends to itself whatever its query is
    no_effect = ("*.q_proj.weight", "*.k_proj.weight") if length == 2 else ()
    assert_equals_one_process(llama_case(length, padding, no_effect=no_effect), setting)


# test_parity.py has meshes of more axes, and test_ring_attention.py rings of any size
def test_a_ring_of_four_ranks_trains_as_on_one_process():
    assert_equals_one_process(llama_case(21, "left"), Setting(HybridParallelPlugin, {**RING, "sp_size": 4}, 4))


@matrix(
    ["tp", "all_to_all"],
    options=named([{"tp_size": 2}, ULYSSES, RING, SPLIT], ["tp", "all_to_all", "ring_attn", "split_gather"]),
)
@on_ranks(2)
def test_layers_that_are_computed_again_give_the_same_gradients(options):
    """Two batches of different lengths are underway when layers are computed again."""
    gradients = []
    for switch in (None, "booster", "transformers"):
        booster, model, optimizer = boosted("transformers/gpt2_lm", options)
        if switch == "booster":
            enable_activation_checkpointing(model)
        elif switch == "transformers":
            own = model.unwrap()
            # Newer versions of transformers warn of the old name.
            getattr(own, "activation_checkpointing_enable", own.gradient_checkpointing_enable)()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        torch.manual_seed(5)
        loss = model(**batch_of(0, 9, None)).loss + model(**batch_of(1, 14, "right")).loss
        booster.backward(loss, optimizer)
        gradients.append({key: full_gradient(booster, model, key) for key, _ in model.unwrap().named_parameters()})
    for found in gradients[1:]:
        for key, gradient in gradients[0].items():
            torch.testing.assert_close(found[key], gradient, **TOLERANCE, msg=key)


@MODES
@on_ranks(2)
def test_dropout_differs_between_parts_of_a_sequence(options):
    name = "transformer.h.1.mlp.dropout"
    _, model, _ = boosted("transformers/gpt2_lm", options)
    before = torch.get_rng_state()
    model(**batch_of(0, 8, None))
    assert torch.equal(torch.get_rng_state(), before)  # without dropout, nothing is drawn
    seen = []
    dropout = model.unwrap().get_submodule(name)
    dropout.p = 0.5
    dropout.register_forward_hook(lambda _, args, output: seen.append((output == 0) & (args[0] != 0)))
    model(**batch_of(0, 8, None))
    assert not torch.equal(torch.get_rng_state(), before)
    after = [None] * dist.get_world_size()
    dist.all_gather_object(after, (seen[0], torch.get_rng_state()))
    assert seen[0].shape[1] == 4
    assert 0.3 < float(seen[0].float().mean()) < 0.7
    assert not torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])  # outside of the layers all draw alike


@on_ranks(2)
def test_shared_and_saved_configurations_are_not_changed(tmp_path):
    import json

    from transformers import LlamaForCausalLM

    other = get_model("transformers/llama").seeded()
    mine = LlamaForCausalLM(other.config)
    booster = Booster(plugin=HybridParallelPlugin(**ULYSSES))
    model, *_ = booster.boost(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    assert other.config._attn_implementation == "sdpa"
    other(**batch_of(0, 8, None))
    booster.save_model(model, tmp_path, shard=True)
    assert "booster" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**batch_of(0, 8, None)).loss, model(**batch_of(0, 8, None)).loss)


def boost_and_run(name, options, **more):
    _, model, _ = boosted(f"transformers/{name}", options)
    zoo = get_model(f"transformers/{name}")
    model(**{**zoo.whole(0, 1, 4), **more})


@pytest.mark.parametrize(
    ("name", "options", "more", "message"),
    [
        ("llama", ULYSSES, {"output_hidden_states": True}, "`output_hidden_states=True` asks for what the layers"),
        ("llama", ULYSSES, {"attention_mask": torch.ones(4, 1, 3, 3)}, r"shape \(4, 1, 3, 3\) does not fit a sequence"),
        ("llama", {**RING, "parallel_output": True}, {"logits_to_keep": 1}, "asked for with the logits of 1 positions"),
        ("llama", ULYSSES, {"use_cache": True}, None),
    ],
)
def test_unsupported_adapters_are_named(name, options, more, message):
    if message is None:  # a cache that is empty yet is none
        run_on_ranks(boost_and_run, 2, name, options, **more)
    else:
        expect_on_ranks(ConfigError, message, boost_and_run, 2, name, options, **more)
