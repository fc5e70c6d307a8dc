"""Mixtures of experts: transformers holds experts in one tensor and its files hold them one by one, both ways here."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from booster_core import Booster, LazyInitContext
from booster_core.errors import CheckpointError
from booster_core.plugin import discovery
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime.checkpoint import CheckpointFiles
from booster_runtime.lazy import load_pretrained
from booster_runtime.state.regions import slices_of
from booster_runtime.state.replicated import ReplicatedStateAdapter
from booster_testing import run_on_ranks

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
"""Twelve, so that 10 comes after 9 and not after 1."""


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=12, **SMALL))


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(shared_expert_intermediate_size=12, **EXPERTS, **SMALL)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=4, **EXPERTS, **SMALL))


def deepseek_v2():
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**{**SMALL, **LATENT}))


def deepseek_v3():
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SMALL, **LATENT}))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


FACTORIES = [mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3]


@pytest.fixture(autouse=True)
def _leave_nothing_behind(monkeypatch, tmp_path):
    """Keep transformers from leaving its loading threads, and torch from setting a variable for good."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def build(factory, seed=0):
    torch.manual_seed(seed)
    return factory().eval()


def tensors_in(folder):
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def save(model, folder, **options):
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    CheckpointFiles(DistCoordinator()).save_model(adapter, folder, shard=True, module=model, **options)


def load(model, folder, **options):
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    return CheckpointFiles(DistCoordinator()).load_model(adapter, folder, module=model, **options)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_folder_of_transformers_is_read(factory, tmp_path):
    model, other = build(factory), build(factory, seed=1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert any("experts.11." in key for key in tensors_in(tmp_path))
    assert load(other, tmp_path).is_complete
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_folder_has_the_tensors_that_transformers_writes(factory, tmp_path):
    model = build(factory)
    model.save_pretrained(tmp_path / "theirs")
    save(model, tmp_path / "ours", size_per_shard=1)
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(loaded.state_dict(), model.state_dict())


def boosted_folder(plugin, options, source, target):
    """Load a folder into a boosted model, change it, and save it."""
    booster = Booster("cpu", None, make_plugin(plugin, options))
    model = build(mixtral, seed=1)
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.load_model(model, source)
    booster.save_model(model, target, shard=True)


def make_plugin(plugin, options):
    if plugin != "hybrid":
        from booster_core.plugin import load as find

        return find(plugin)(**options)
    from booster_hybrid import HybridParallelPlugin

    return HybridParallelPlugin(**options)


@pytest.mark.parametrize(
    ("plugin", "options", "world_size"),
    [
        ("zero", {"stage": 1}, 2),
        ("fsdp", {}, 2),
        ("gemini", {}, 2),
        ("hybrid", {"tp_size": 2, "pp_size": 1}, 2),
    ],
    ids=["zero", "fsdp", "gemini", "tp2"],
)
def test_sharded_models_read_and_write_what_transformers_does(plugin, options, world_size, tmp_path):
    model = build(mixtral)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    run_on_ranks(boosted_folder, world_size, plugin, options, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


def lazily(plugin, folder):
    booster = Booster("cpu", None, plugin)
    with LazyInitContext():
        model = mixtral()
    load_pretrained(model, folder)
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save_model(model, f"{folder}-again", shard=True)


def test_a_lazy_model_reads_its_parts_of_each_expert(tmp_path):
    model = build(mixtral)
    model.save_pretrained(tmp_path / "m")
    run_on_ranks(lazily, 2, "zero", str(tmp_path / "m"))
    assert_same(tensors_in(tmp_path / "m-again"), tensors_in(tmp_path / "m"))


def resumed(root):
    booster = Booster("cpu", None, "zero")
    model = build(mixtral)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    booster.save_checkpoint(root, step=1, model=model, optimizer=optimizer, ema=booster.ema(model))
    with torch.no_grad():
        for parameter in model.unwrap().parameters():
            parameter.zero_()
    booster.load_checkpoint(root, model=model, optimizer=optimizer)
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_training_state_comes_back_and_is_a_folder_of_transformers(tmp_path):
    assert run_on_ranks(resumed, 2, str(tmp_path)) == [True, True]
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "step-00000001" / "model")
    assert_same(loaded.state_dict(), build(mixtral).state_dict())


def test_folders_with_the_modules_own_names_are_read(tmp_path):
    model, other = build(mixtral), build(mixtral, seed=1)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    assert load(other, tmp_path).is_complete
    assert_same(other.state_dict(), model.state_dict())


@contextlib.contextmanager
def transposed_files():
    """Let the files of Llamas hold two of the matrices transposed, under names of their own."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    entries = [
        WeightConverter(f"mlp.w{name}.weight", f"mlp.{name}_proj.weight", [Transpose(0, 1)]) for name in ("up", "down")
    ]
    conversion_mapping.register_checkpoint_conversion_mapping("llama", entries, overwrite=True)
    try:
        yield
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache = None
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard("llama")


def test_files_hold_tensors_transposed_where_a_registered_conversion_says_so(tmp_path):
    with transposed_files():
        model, other = build(llama), build(llama, seed=1)
        model.save_pretrained(tmp_path / "theirs")
        save(model, tmp_path / "ours")
        found = tensors_in(tmp_path / "ours")
        assert found["model.layers.1.mlp.wdown.weight"].shape == (24, 16)
        assert_same(found, tensors_in(tmp_path / "theirs"))
        assert load(other, tmp_path / "theirs").is_complete
        assert_same(other.state_dict(), model.state_dict())
    # Each of two ranks holds rows of a matrix, or a flat range of it.
    assert run_on_ranks(transposed_parts, 2, str(tmp_path)) == [[], []]


def transposed_parts(folder):
    """Return what differs where boosted models save and load such files."""
    wrong = []
    for plugin in ("gemini", "fsdp"):
        with transposed_files():
            booster = Booster("cpu", None, discovery.load(plugin)())
            model, other = build(llama), build(llama, seed=1)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
            booster.save_model(model, f"{folder}/{plugin}", shard=True)
            found, theirs = tensors_in(Path(folder) / plugin), tensors_in(Path(folder) / "theirs")
            wrong += [f"{plugin} saves {key}" for key in theirs if not torch.equal(found[key], theirs[key])]
            other, *_ = booster.boost(other, torch.optim.AdamW(other.parameters()))
            booster.load_model(other, f"{folder}/{plugin}")
            for shard in booster.state_adapter(other).model_shards():
                part = expected[shard.name][slices_of(shard.box)].reshape(-1)[slice(*shard.flat_range)]
                wrong += [] if torch.equal(shard.data.reshape(-1), part) else [f"{plugin} loads {shard.name}"]
    return wrong


def test_reads_only_the_bytes_of_a_box(tmp_path):
    from booster_runtime.checkpoint.load.naming import as_model_names
    from booster_runtime.checkpoint.load.source import Source

    model = build(mixtral)
    model.save_pretrained(tmp_path)
    source = Source(tmp_path, "model")
    read, real = [], source.read
    source.read = lambda key, box, out: (read.append((key, out.numel())), real(key, box, out))
    try:
        name = "model.layers.1.mlp.experts.gate_up_proj"
        named = as_model_names(source, model, model.state_dict())
        whole = model.state_dict()[name]
        for box in (((3, 5), (20, 30), (0, 16)), ((9, 11), (0, 48), (5, 6)), ((0, 12), (23, 25), (2, 16))):
            read.clear()
            out = torch.empty([stop - start for start, stop in box])
            named.read(name, box, out.view(-1))
            assert torch.equal(out, whole[tuple(slice(*edges) for edges in box)])
            assert sum(numel for _, numel in read) == out.numel()
    finally:
        source.close()


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_experts_that_do_not_fit_together_are_refused(damage, tmp_path):
    model = build(mixtral)
    model.save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.block_sparse_moe.experts.11.w2.weight"
    tensors[name] = {"shape": tensors[name][:3].clone(), "dtype": tensors[name].half()}.get(damage)
    if damage == "missing":
        del tensors[name]
    save_file(tensors, path)
    match = "shape" if damage == "missing" else "don't fit together"
    with pytest.raises(CheckpointError, match=match):
        load(build(mixtral, seed=1), tmp_path)


def test_an_index_names_the_experts(tmp_path):
    save(build(mixtral), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - no dict
    shutil.rmtree(tmp_path)
