"""Hugging Face's `from_pretrained` reads what we write, and we read what its `save_pretrained` writes."""

import json

import pytest
import torch
from engine_calls import EngineCalls
from matrix import matrix, named

from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import run_on_ranks

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def llama(tie=False):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=tie, **SMALL))


def tied_llama():
    return llama(tie=True)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    )


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **SMALL))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=16, **SMALL))


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


FACTORIES = [llama, tied_llama, gpt2, bert, t5, vit, whisper]


def build(factory, seed=0):
    torch.manual_seed(seed)
    return factory()


def save_on_ranks(factory_name, folder, shard, use_safetensors, dtype):
    c = DistCoordinator()
    model = build(globals()[factory_name])
    adapter = ReplicatedStateAdapter(model, None, c)
    io = EngineCalls()
    io.save_model(
        adapter, folder, shard=shard, use_safetensors=use_safetensors, size_per_shard=1, module=model, dtype=dtype
    )


def assert_from_pretrained_equals(model, folder, dtype=None):
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert theirs[name].dtype == expected.dtype, name
        assert torch.equal(theirs[name], expected), name
    return loaded


@matrix(1, factory=FACTORIES, use_safetensors=named([True, False], ["safetensors", "bin"]))
def test_from_pretrained_reads_a_sharded_folder(factory, use_safetensors, tmp_path):
    run_on_ranks(save_on_ranks, 2, factory.__name__, str(tmp_path), True, use_safetensors, None)
    assert_from_pretrained_equals(build(factory), tmp_path)


def test_from_pretrained_reads_another_dtype(tmp_path):
    run_on_ranks(save_on_ranks, 2, "llama", str(tmp_path), True, True, torch.bfloat16)
    assert_from_pretrained_equals(build(llama), tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_from_pretrained_reads_a_variant(tmp_path):
    model = build(llama)
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    EngineCalls().save_model(adapter, tmp_path, shard=True, prefix="ema", module=model)
    loaded = type(model).from_pretrained(tmp_path, variant="ema")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@matrix(1, factory=FACTORIES, use_safetensors=named([True, False], ["safetensors", "bin"]))
def test_one_file_named_as_transformers_names_it(factory, use_safetensors, tmp_path):
    model = build(factory)
    model.config.save_pretrained(tmp_path)
    name = "model.safetensors" if use_safetensors else "pytorch_model.bin"
    run_on_ranks(save_on_ranks, 2, factory.__name__, str(tmp_path / name), False, use_safetensors, None)
    assert_from_pretrained_equals(model, tmp_path)


@matrix(1, factory=FACTORIES, max_shard_size=named(["5GB", "30KB"], ["one-file", "sharded"]))
def test_we_read_what_save_pretrained_writes(factory, max_shard_size, tmp_path):
    model = build(factory)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    other = build(factory, seed=1)
    report = EngineCalls().load_model(ReplicatedStateAdapter(other, None, DistCoordinator()), tmp_path, module=other)
    assert report.is_complete
    for (name, ours), theirs in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(other.get_parameter(name), parameter), name


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_tensor_is_found_under_either_name(kept, tmp_path):
    from safetensors.torch import save_file

    model = build(tied_llama)
    tensors = model.state_dict()
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    save_file({**tensors, kept: model.lm_head.weight.detach().clone()}, tmp_path / "model.safetensors")
    other = build(tied_llama, seed=1)
    adapter = ReplicatedStateAdapter(other, None, DistCoordinator())
    assert EngineCalls().load_model(adapter, tmp_path).is_complete
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert torch.equal(other.model.embed_tokens.weight, model.lm_head.weight)


def test_config_files_are_as_save_pretrained_writes_them(tmp_path):
    model = build(gpt2)
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    EngineCalls().save_model(adapter, tmp_path / "ours", shard=True, module=model)
    assert model.config.architectures is None, "the user's configuration is left alone"
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / folder / name).read_text()) for folder in ("ours", "theirs"))
        assert ours == theirs, name
