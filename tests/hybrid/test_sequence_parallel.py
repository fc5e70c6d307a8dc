"""Sequences split over ranks: models train as one process does, whatever the mode, the mesh and the lengths."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from cases import Setting, assert_equals_one_process, own_loss, zoo_case
from hybrid_runs import MODES, RING, ULYSSES, boosted, padded_text
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing, full_gradient


def share_of(length, padding, step, replica):
    return {key: value[replica::2] for key, value in padded_text(step, length, padding).items()}


def llama_case(length, padding, name="transformers/llama", **changes):
    return zoo_case(name, batch=functools.partial(share_of, length, padding), loss=own_loss, **changes)


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
    options=named(MODES.values(), MODES),
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
    options=named([{"tp_size": 2}, *MODES.values()], ["tp", *MODES]),
)
@on_ranks(2)
def test_layers_that_are_computed_again_give_the_same_gradients(options):
    """Two batches of different lengths are underway when layers are computed again."""
    gradients = []
    for switch in (None, "booster", "transformers"):
        booster, model, optimizer = boosted(get_model("transformers/gpt2_lm").seeded(), **options)
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
        loss = model(**padded_text(0, 9)).loss + model(**padded_text(1, 14, "right")).loss
        booster.backward(loss, optimizer)
        gradients.append({key: full_gradient(booster, model, key) for key, _ in model.unwrap().named_parameters()})
    for found in gradients[1:]:
        for key, gradient in gradients[0].items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=2e-6, msg=key)  # sums in another order


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@on_ranks(2)
def test_dropout_differs_between_parts_of_a_sequence(options):
    name = "transformer.h.1.mlp.dropout"
    _, model, _ = boosted(get_model("transformers/gpt2_lm").seeded(), **options)
    before = torch.get_rng_state()
    model(**padded_text(0, 8))
    assert torch.equal(torch.get_rng_state(), before)  # without dropout, nothing is drawn
    seen = []
    dropout = model.unwrap().get_submodule(name)
    dropout.p = 0.5
    dropout.register_forward_hook(lambda _, args, output: seen.append((output == 0) & (args[0] != 0)))
    model(**padded_text(0, 8))
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
    booster, model, _ = boosted(mine, **ULYSSES)
    assert other.config._attn_implementation == "sdpa"
    other(**padded_text(0, 8))
    booster.save_model(model, tmp_path, shard=True)
    assert "booster" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**padded_text(0, 8)).loss, model(**padded_text(0, 8)).loss)


@pytest.mark.parametrize(
    ("name", "options", "more", "message"),
    [
        ("llama", ULYSSES, {"output_hidden_states": True}, "`output_hidden_states=True` asks for what the layers"),
        ("llama", ULYSSES, {"attention_mask": torch.ones(4, 1, 3, 3)}, r"shape \(4, 1, 3, 3\) does not fit a sequence"),
        ("llama", {**RING, "parallel_output": True}, {"logits_to_keep": 1}, "asked for with the logits of 1 positions"),
        ("llama", ULYSSES, {"use_cache": True}, None),
    ],
)
@on_ranks(2)
def test_unsupported_adapters_are_named(name, options, more, message):
    zoo = get_model(f"transformers/{name}")
    _, model, _ = boosted(zoo.seeded(), **options)
    # A cache that is empty yet is none.
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        model(**{**zoo.whole(0, 1, 4), **more})
