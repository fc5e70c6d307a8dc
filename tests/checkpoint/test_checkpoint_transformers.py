"""Hugging Face's `from_pretrained` reads what we write, and we read what its `save_pretrained` writes."""

import json

import pytest
import torch
from engine_calls import EngineCalls
from matrix import matrix, named
from model_zoo import get_model

from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import run_on_ranks

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


FAMILIES = [
    "llama",
    "llama_tied",
    "gpt2_lm",
    "bert_masked_lm",
    "t5_generation",
    "vit_classification",
    "whisper_generation",
]


def build(family, seed=0):
    torch.manual_seed(seed)
    return get_model(f"transformers/{family}").build()


def save_on_ranks(family, folder, shard, use_safetensors, dtype):
    c = DistCoordinator()
    model = build(family)
    adapter = ReplicatedStateAdapter(model, None, c)
    options = {"shard": shard, "size_per_shard": 1, "use_safetensors": use_safetensors, "dtype": dtype}
    EngineCalls().save_model(adapter, folder, module=model, **options)
    assert model.config.architectures is None, "the user's configuration is left alone"


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


def test_from_pretrained_reads_another_dtype(tmp_path):
    run_on_ranks(save_on_ranks, 2, "llama", str(tmp_path), True, True, torch.bfloat16)
    assert_from_pretrained_equals(build("llama"), tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@matrix(1, family=FAMILIES, use_safetensors=named([True, False], ["safetensors", "bin"]), shard=[True, False])
def test_from_pretrained_reads_a_folder_and_a_file(family, use_safetensors, shard, tmp_path):
    model, path = build(family), tmp_path
    if not shard:
        model.config.save_pretrained(tmp_path)
        path = tmp_path / ("model.safetensors" if use_safetensors else "pytorch_model.bin")
    run_on_ranks(save_on_ranks, 2, family, str(path), shard, use_safetensors, None)
    assert_from_pretrained_equals(model, tmp_path)


@matrix(1, family=FAMILIES, max_shard_size=named(["5GB", "30KB"], ["one-file", "sharded"]))
def test_we_read_what_save_pretrained_writes(family, max_shard_size, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    other = build(family, seed=1)
    report = EngineCalls().load_model(ReplicatedStateAdapter(other, None, DistCoordinator()), tmp_path, module=other)
    assert report.is_complete
    for (name, ours), theirs in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(other.get_parameter(name), parameter), name


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_tensor_is_found_under_either_name(kept, tmp_path):
    from safetensors.torch import save_file

    model = build("llama_tied")
    tensors = model.state_dict()
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    save_file({**tensors, kept: model.lm_head.weight.detach().clone()}, tmp_path / "model.safetensors")
    other = build("llama_tied", seed=1)
    adapter = ReplicatedStateAdapter(other, None, DistCoordinator())
    assert EngineCalls().load_model(adapter, tmp_path).is_complete
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert torch.equal(other.model.embed_tokens.weight, model.lm_head.weight)
