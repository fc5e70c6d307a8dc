"""Adapters under every strategy that declares them: gradients, memory, files, and who may load what."""

from collections.abc import Mapping

import pytest
import torch
from adapted_models import perturbed
from matrix import matrix, named
from safetensors.torch import load_file

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 3),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 4096}, 2),
    "zero3": (HybridParallelPlugin, {"zero_stage": 3}, 2),
}
MESHES = {
    **RUNS,
    "tp2": (HybridParallelPlugin, {"tp_size": 2}, 2),
    "pp2": (HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}, 2),
}
CONFIG = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
MAX_SAMPLES = 12


def make_model(**changes):
    torch.manual_seed(3)
    return tiny_llama(**changes)


def make_config(**changes):
    return peft.LoraConfig(**{**CONFIG, **changes})


def tokens_of(step):
    return torch.randint(64, (MAX_SAMPLES, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def boost(plugin_class, options, *, precision=None, changes: Mapping = {}, config: Mapping = {}, folder=None):
    booster = Booster("cpu", precision, plugin_class(**options))
    model = make_model(**changes)
    if folder is None:
        model = perturbed(booster.enable_lora(model, lora_config=make_config(**config)))
    else:
        model = booster.enable_lora(model, pretrained_dir=folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # the frozen base too, as most scripts do
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def train(booster, model, optimizer, steps):
    losses = []
    index, size = booster.plugin.data_parallel_coordinates(DistCoordinator())
    in_stages = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.config.pipeline.size > 1
    for step in steps:
        tokens = tokens_of(step)[index::size]
        if in_stages:
            batch = iter([{"input_ids": tokens, "labels": tokens}])
            loss = booster.execute_pipeline(batch, model, lambda outputs, _: outputs.loss, optimizer)["loss"]
            loss = booster.context.coordinator.broadcast_object(loss, src=1)
        else:
            loss = loss_of(model, tokens)
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def mean_losses(per_rank):
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]


# ---- errors of other ranks


class Breaks(torch.utils.data.SequentialSampler):
    """Raises on rank 1 when its order is drawn."""

    def __iter__(self):
        if DistCoordinator().rank == 1:
            msg = "no such file"
            raise OSError(msg)
        return super().__iter__()


def boost_beside_an_error(where):
    rank = DistCoordinator().rank
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    model = booster.enable_lora(make_model(), lora_config=make_config())
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
    optimizer.state[frozen]["exp_avg"] = torch.zeros_like(frozen)
    (group,) = optimizer.param_groups
    before = list(group["params"]), list(group["param_names"])
    loader = torch.utils.data.DataLoader(range(4), sampler=Breaks(range(4)) if where == "loader" else None)
    criterion = "none" if where == "checks" and rank == 1 else None
    with pytest.raises((OSError, TypeError), match=None if rank == 1 else "rank 1: "):
        booster.boost(model, optimizer, criterion, loader)
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in before[0]]
    assert group["param_names"] == before[1]
    assert frozen in optimizer.state


@pytest.mark.parametrize("where", ["checks", "loader"])
def test_an_error_on_another_rank_leaves_the_optimizer_as_it_was(where):
    run_on_ranks(boost_beside_an_error, 2, where)


# ---- gradients


def gradients_on_ranks(plugin_class, options, changes, config):
    booster, model, optimizer = boost(plugin_class, options, changes=changes, config=config)
    coordinator = DistCoordinator()
    tokens = tokens_of(0)[coordinator.rank :: coordinator.world_size]
    booster.backward(loss_of(model, tokens), optimizer)
    held = coordinator.all_gather_object([shard.name for shard in booster.state_adapter(model).model_shards()])
    names = dict.fromkeys(name for of_rank in held for name in of_rank)
    gradients = {name: full_gradient(booster, model, name) for name in names}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


@matrix(
    ["plain-single"],
    **{
        "changes, config": named(
            [
                ({}, {}),
                ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
                ({}, {"modules_to_save": ["lm_head"], "bias": "all"}),
            ],
            ["plain", "tied-dora", "modules-to-save"],
            joint=True,
        )
    },
    run=RUNS,
)
def test_gradients_of_adapters_equal_one_process(run, changes, config):
    plugin_class, options, world_size = RUNS[run]
    plain = perturbed(peft.get_peft_model(make_model(**changes), make_config(**config)))
    loss_of(plain, tokens_of(0)).backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert all("lora_" in name or "modules_to_save" in name for name in expected)
    for actual in run_on_ranks(gradients_on_ranks, world_size, plugin_class, options, changes, config):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))


# ---- memory


# ---- files


def save_adapters(plugin_class, options, folder, config, use_safetensors):
    booster, model, optimizer = boost(plugin_class, options, config=config)
    train(booster, model, optimizer, range(2))
    booster.save_lora_as_pretrained(model, folder, use_safetensors)
    with torch.no_grad():
        logits = model(input_ids=tokens_of(9)).logits
    return logits, whole_model(booster, model)


@matrix(
    ["bin-zero1", "modules-to-save-dora-zero3"],
    **{
        "config, use_safetensors": named(
            [({}, True), ({"modules_to_save": ["lm_head"], "use_dora": True}, True), ({}, False)],
            ["plain", "modules-to-save-dora", "bin"],
            joint=True,
        )
    },
    run=RUNS,
)
def test_a_saved_folder_loads_in_stock_peft_with_equal_logits(run, config, use_safetensors, tmp_path):
    plugin_class, options, world_size = RUNS[run]
    results = run_on_ranks(
        save_adapters, world_size, plugin_class, options, str(tmp_path / "lora"), config, use_safetensors
    )
    suffix = "safetensors" if use_safetensors else "bin"
    files = sorted(path.name for path in (tmp_path / "lora").iterdir())
    assert files == ["adapter_config.json", f"adapter_model.{suffix}"]
    loaded = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "lora"))
    with torch.no_grad():
        logits = loaded(input_ids=tokens_of(9)).logits
    assert_same_tensors({"logits": logits}, {"logits": results[0][0]}, EXACT)


# ---- checkpoints of the whole model


def train_and_save(plugin_class, options, folder):
    booster, model, optimizer = boost(plugin_class, options, changes={"tie_word_embeddings": True})
    train(booster, model, optimizer, range(2))
    booster.save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    booster.save_model(model, f"{folder}/model", shard=True)
    return train(booster, model, optimizer, range(2, 5))


def train_and_save_adapters_alone(plugin_class, options, folder, precision=None):
    booster, model, optimizer = boost(plugin_class, options, precision=precision, changes={"tie_word_embeddings": True})
    train(booster, model, optimizer, range(2))
    booster.save_checkpoint(folder, step=2, model=model, optimizer=optimizer, save_frozen=False)
    return train(booster, model, optimizer, range(2, 5))


def resume_adapters(plugin_class, options, folder, precision=None, changed=None):
    booster = Booster("cpu", precision, plugin_class(**options))
    model = booster.enable_lora(make_model(tie_word_embeddings=True), lora_config=make_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or name.endswith(changed or "nothing"):
                parameter.view(-1)[-1] += 0.5
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    return train(booster, model, optimizer, range(2, 5))


@pytest.mark.parametrize(
    ("saved", "loaded", "precision"),
    [
        ("single", "fsdp", None),
        ("fsdp", "zero2", None),
        ("zero2", "gemini", "bf16"),
        ("gemini", "ddp", "bf16"),
        ("ddp", "tp2", None),
        ("tp2", "pp2", None),
        ("pp2", "zero3", None),
    ],
)
def test_a_step_without_frozen_parameters_goes_on_over_the_same_base(saved, loaded, precision, tmp_path):
    """A base holds other formats under other plugins, and ranks other parts of it."""
    plugin_class, options, world_size = MESHES[saved]
    expected = run_on_ranks(train_and_save_adapters_alone, world_size, plugin_class, options, str(tmp_path), precision)
    files = list((tmp_path / "step-00000002" / "model").iterdir())
    assert all("lora_" in name for file in files if file.suffix == ".safetensors" for name in load_file(file))
    assert not [file for file in files if file.name == "config.json"], "`from_pretrained` would draw the base"
    plugin_class, options, world_size = MESHES[loaded]
    found = run_on_ranks(resume_adapters, world_size, plugin_class, options, str(tmp_path), precision)
    relative = tolerance_for(torch.float32 if precision is None else torch.bfloat16).relative
    assert mean_losses(found) == pytest.approx(mean_losses(expected), rel=relative)
    for changed in ("layers.1.mlp.down_proj.weight", "embed_tokens.weight"):
        match = r"saved without its \d+ frozen parameters .*other values"
        arguments = (plugin_class, options, str(tmp_path), precision, changed)
        expect_on_ranks(CheckpointError, match, resume_adapters, world_size, *arguments)


@pytest.mark.parametrize("run", ["single", "zero2"])
def test_the_base_loads_without_adapters(run, tmp_path):
    plugin_class, options, world_size = RUNS[run]
    run_on_ranks(train_and_save, world_size, plugin_class, options, str(tmp_path))
    plain = make_model(tie_word_embeddings=True)
    original = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5)
    booster = Booster("cpu")
    with pytest.raises(CheckpointError, match=r"lora_A\.default\.weight"):
        booster.load_model(plain, tmp_path / "model")
    report = booster.load_model(plain, tmp_path / "model", strict=False)
    assert not report.missing
    assert_same_tensors(plain.state_dict(), original, EXACT)
    transformers.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is type(plain)
    assert_same_tensors(loaded.state_dict(), original, EXACT)
