"""Hugging Face's `from_pretrained` reads what we write, and we read what its `save_pretrained` writes."""

import pytest
import torch
from adapted_models import Replicas
from engine_calls import load_module, save_module
from matrix import matrix, named
from model_zoo import get_model
from pretrained_models import Saves, load, make_model, tokens, trained_in_one_process
from ranked import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from booster_core import Booster
from booster_core.checkpoint_io import mebibytes
from booster_core.errors import CheckpointError, ConfigError, MissingRanksError
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from expert_folders import FACTORIES, assert_same, llama, mixtral, tensors_in, transposed_files  # noqa: E402
from expert_folders import build as build_experts  # noqa: E402

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


def save_on_ranks(family, folder, options):
    model = build(family)
    save_module(model, folder, **options)
    assert model.config.architectures is None, "the user's configuration is left alone"


OPTIONS = {
    "sharded": {"shard": True, "size_per_shard": 1},
    "sharded bin": {"shard": True, "size_per_shard": 1, "use_safetensors": False},
    "file": {"shard": False},
    "bf16": {"shard": True, "dtype": torch.bfloat16},
}


@matrix(1, family=FAMILIES, options=OPTIONS)
def test_from_pretrained_reads_what_we_write(family, options, tmp_path):
    model, dtype = build(family), OPTIONS[options].get("dtype", torch.float32)
    if options == "file":
        model.config.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors" if options == "file" else tmp_path
    run_on_ranks(save_on_ranks, 2, family, str(path), OPTIONS[options])
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    expected = {name: each.to(dtype) if each.is_floating_point() else each for name, each in model.state_dict().items()}
    dtypes = [{name: each.dtype for name, each in state.items()} for state in (loaded.state_dict(), expected)]
    assert dtypes[0] == dtypes[1]
    assert_same_tensors(loaded.state_dict(), expected, EXACT)


@matrix(1, family=FAMILIES, max_shard_size=named(["5GB", "30KB"], ["one-file", "sharded"]))
def test_we_read_what_save_pretrained_writes(family, max_shard_size, tmp_path):
    model, other = build(family), build(family, seed=1)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert load_module(other, tmp_path).is_complete
    assert_same_tensors(other.state_dict(), model.state_dict(), EXACT)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(other.get_parameter(name), parameter), name


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_tensor_is_found_under_either_name(kept, tmp_path):
    model = build("llama_tied")
    tensors = model.state_dict()
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    save_file({**tensors, kept: model.lm_head.weight.detach().clone()}, tmp_path / "model.safetensors")
    other = build("llama_tied", seed=1)
    assert load_module(other, tmp_path).is_complete
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert torch.equal(other.model.embed_tokens.weight, model.lm_head.weight)


# ---- mixtures of experts, whose files hold them one by one, and whose modules in one tensor


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_folder_of_transformers_is_read_and_ours_has_its_tensors(factory, tmp_path):
    model, other = build_experts(factory), build_experts(factory, seed=1)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    theirs = tensors_in(tmp_path / "theirs")
    assert any("experts.11." in key for key in theirs)
    assert load_module(other, tmp_path / "theirs").is_complete
    assert_same(other.state_dict(), model.state_dict())
    save_module(model, tmp_path / "ours", shard=True, size_per_shard=1)
    assert_same(tensors_in(tmp_path / "ours"), theirs)
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(loaded.state_dict(), model.state_dict())


def test_folders_with_the_modules_own_names_are_read(tmp_path):
    model, other = build_experts(mixtral), build_experts(mixtral, seed=1)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    assert load_module(other, tmp_path).is_complete
    assert_same(other.state_dict(), model.state_dict())


def test_files_hold_tensors_transposed_where_a_registered_conversion_says_so(tmp_path):
    with transposed_files():
        model, other = build_experts(llama), build_experts(llama, seed=1)
        model.save_pretrained(tmp_path / "theirs")
        save_module(model, tmp_path / "ours", shard=True)
        found = tensors_in(tmp_path / "ours")
        assert found["model.layers.1.mlp.wdown.weight"].shape == (24, 16)
        assert_same(found, tensors_in(tmp_path / "theirs"))
        assert load_module(other, tmp_path / "theirs").is_complete
        assert_same(other.state_dict(), model.state_dict())


def test_reads_only_the_bytes_of_a_box(tmp_path):
    from booster_checkpoint.load.naming import as_model_names
    from booster_checkpoint.load.source import Source

    model = build_experts(mixtral)
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
    model = build_experts(mixtral)
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
        load_module(build_experts(mixtral, seed=1), tmp_path)


# ---- ``save_pretrained`` follows options of transformers, or says why it can't; what it writes is in ``together``


def boost(plugin=None):
    booster, model = Booster(plugin=plugin), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return booster, *booster.boost(model, optimizer)[:2]


def test_options_of_transformers_are_followed(tmp_path):
    booster, model, optimizer = boost()
    booster.backward(model(input_ids=tokens(), labels=tokens()).loss, optimizer)
    optimizer.step()
    options = {"is_main_process": True, "variant": "ema", "safe_serialization": False, "max_shard_size": "2MB"}
    model.save_pretrained(tmp_path, **options)
    assert list(tmp_path.glob("pytorch_model.ema*.bin"))
    assert not list(tmp_path.glob("*.safetensors"))
    loaded = load(tmp_path, variant="ema", use_safetensors=False)
    assert_same_tensors(loaded.state_dict(), trained_in_one_process().state_dict(), EXACT)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"state_dict": {}}, ConfigError, "leave `state_dict` out"),
        ({"push_to_hub": True}, ConfigError, r"`push_to_hub=True` .*upload_folder"),
        ({"max_shard_size": "10KB"}, ConfigError, "below 1 MiB"),
        ({"max_shard_size": "many"}, ConfigError, r"`max_shard_size='many'` is not a size"),
        ({"is_main_process": False}, ConfigError, "`is_main_process=False` on rank 0"),
        ({"save_original_format": False}, ConfigError, "can't be followed"),
        ({"shard_size": 3}, TypeError, "unexpected keyword argument 'shard_size'"),
    ],
)
def test_what_cannot_be_followed_raises(options, error, match):
    _, model, _ = boost()
    with pytest.raises(error, match=match):
        model.save_pretrained("never", **options)


def test_a_large_maximum_size_is_whole_mebibytes():
    assert [mebibytes(size) for size in ("5GB", "1GiB", "3.5MiB", 2**21, "200MB")] == [4768, 1024, 3, 2, 190]


@on_ranks(2, group_timeout_seconds=2)
def test_saving_on_rank_0_alone_names_who_is_missing(tmp_path):
    folder = str(tmp_path)
    _, model, _ = boost(Replicas())
    if torch.distributed.get_rank() == 0:
        with pytest.raises(MissingRanksError, match=r"`save_pretrained`.*rank 1"):
            model.save_pretrained(folder)


def test_a_model_of_another_library_saves_itself_and_others_do_not(tmp_path):
    model, *_ = Booster().boost(Saves(4, 2))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "own.pt").exists()
    model, *_ = Booster().boost(nn.Linear(2, 1))
    assert not hasattr(model, "save_pretrained")
