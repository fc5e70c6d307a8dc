"""Mixtures of experts: transformers holds experts in one tensor and its files hold them one by one, both ways here."""

import pytest
import torch
from engine_calls import EngineCalls
from safetensors.torch import load_file, save_file

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from expert_folders import FACTORIES, assert_same, build, llama, mixtral, tensors_in, transposed_files  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


def save(model, folder, **options):
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    EngineCalls().save_model(adapter, folder, shard=True, module=model, **options)


def load(model, folder, **options):
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    return EngineCalls().load_model(adapter, folder, module=model, **options)


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


def test_folders_with_the_modules_own_names_are_read(tmp_path):
    model, other = build(mixtral), build(mixtral, seed=1)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    assert load(other, tmp_path).is_complete
    assert_same(other.state_dict(), model.state_dict())


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


def test_reads_only_the_bytes_of_a_box(tmp_path):
    from booster_checkpoint.load.naming import as_model_names
    from booster_checkpoint.load.source import Source

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
