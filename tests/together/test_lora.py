"""Adapters under every strategy that declares them: gradients, files, lazy models, and who may load what."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from adapted_models import perturbed
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, backward, boosted, runs, step
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import load_file
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext, full_gradient
from booster_runtime.lazy import is_lazy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # Those are peft's own as well.
    "ignore:Unsupported layer type:UserWarning",
    "ignore:Sparse invariant checks:UserWarning",
)

TARGETS = ["q_proj", "v_proj"]
EXPERTS = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, num_local_experts=4))


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=24, num_experts=4)
    return transformers.Qwen3MoeForCausalLM(config)


def lora(**changes):
    return partial(peft.LoraConfig, **{"r": 4, "target_modules": TARGETS, "lora_alpha": 8, **changes})


OF_EXPERTS = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
"""peft puts two wrappers around the experts, and each tensor has its own name."""
tied_llama = partial(tiny_llama, tie_word_embeddings=True)
KINDS = {
    "lora": (tiny_llama, lora()),
    "tied-dora": (tied_llama, lora(target_modules=["q_proj", "down_proj"], use_dora=True)),
    "modules-to-save": (tiny_llama, lora(modules_to_save=["lm_head"], bias="all")),
    "modules-to-save-dora": (tiny_llama, lora(modules_to_save=["lm_head"], use_dora=True)),
    "mixtral": (mixtral, OF_EXPERTS),
    "qwen3-moe": (qwen3_moe, OF_EXPERTS),
    "ia3": (
        tiny_llama,
        partial(peft.IA3Config, target_modules=[*TARGETS, "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "loha": (tiny_llama, partial(peft.LoHaConfig, r=2, target_modules=TARGETS)),
    "lokr": (tiny_llama, partial(peft.LoKrConfig, r=2, target_modules=TARGETS)),
    "oft": (tiny_llama, partial(peft.OFTConfig, r=0, oft_block_size=4, target_modules=TARGETS)),
    "vera": (tiny_llama, partial(peft.VeraConfig, r=4, target_modules=["q_proj"])),
    "fourierft": (tiny_llama, partial(peft.FourierFTConfig, n_frequency=20, target_modules=TARGETS)),
    "hra": (tiny_llama, partial(peft.HRAConfig, r=2, target_modules=TARGETS)),
    "vblora": (tiny_llama, partial(peft.VBLoRAConfig, r=2, num_vectors=8, vector_length=4, target_modules=TARGETS)),
    "ln-tuning": (tiny_llama, partial(peft.LNTuningConfig, target_modules=["input_layernorm"])),
    "prompt": (tiny_llama, partial(peft.PromptTuningConfig, num_virtual_tokens=4, task_type="CAUSAL_LM")),
    "shira": (tiny_llama, partial(peft.ShiraConfig, r=2, target_modules=TARGETS)),
}
COMPUTED = ("prompt", "shira")
"""Of these, peft does not save parameters, but what it computes of them."""
SPREAD = {
    "ddp, search": Setting(TorchDDPPlugin, {"find_unused_parameters": True}),
    "ep": Setting(HybridParallelPlugin, {"ep_size": 2}),
    "ep-tp-zero1": Setting(HybridParallelPlugin, {"ep_size": 2, "tp_size": 2, "zero_stage": 1}, 4),
}
"""For experts, of which a batch may use some alone."""
SETTINGS = {
    **RUNS,
    **SPREAD,
    "fsdp-small": Setting(TorchFSDPPlugin, {"unit_min_numel": 32}),
    "zero2-three": Setting(LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 3),
}


def make_model(kind="lora", **changes):
    torch.manual_seed(3)
    return KINDS[kind][0](**changes)


def adapted(kind, booster=None):
    """Return a model with adapters of a kind, of whose values none are zeros; a Booster adds those of LoRA itself."""
    model, config = make_model(kind), KINDS[kind][1]()
    if booster is not None and isinstance(config, peft.LoraConfig):
        model = booster.enable_lora(model, lora_config=config)
    else:
        model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def num_ranks_of(run):
    return SETTINGS[run].num_ranks


def batch_of(number, index=0, size=1):
    tokens = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(number))[index::size]
    return {"input_ids": tokens, "labels": tokens}


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=batch_of(9)["input_ids"]).logits


def trained_names(model):
    """Return the names of parameters in files by their paths."""
    trained = [path for path, parameter in model.named_parameters() if parameter.requires_grad]
    return {path: path.removeprefix("base_model.model.") for path in trained}


# ---- gradients and files


OF_LAYERS = ["single", "ddp", "zero1", "zero2-three", "gemini", "zero3"]
SAVED_BY_PARAMETER = [kind for kind in KINDS if kind not in ("mixtral", "qwen3-moe", *COMPUTED)]
CASES = [(kind, run) for kind in SAVED_BY_PARAMETER for run in OF_LAYERS]
# DoRA and HRA read the weight outside of a unit as small as an adapter.
CASES += [(kind, "fsdp" if "dora" in kind or kind == "hra" else "fsdp-small") for kind in SAVED_BY_PARAMETER]
CASES += [
    (kind, run)
    for kind in ("mixtral", "qwen3-moe")
    for run in ("single", "fsdp", "zero2", "gemini", "hybrid-tp", *SPREAD)
]
BY_DEFAULT = [
    *("lora-single", "lora-zero1", "modules-to-save-dora-zero3", "ia3-single"),
    *("mixtral-single", "mixtral-fsdp", "qwen3-moe-gemini", "mixtral-ep", "mixtral-hybrid-tp", "qwen3-moe-ep-tp-zero1"),
]


@matrix(BY_DEFAULT, **{"kind, run": CASES})
@on_ranks(num_ranks_of)
def test_gradients_equal_one_process_and_files_load_in_peft(kind, run, tmp_path):
    plain = adapted(kind)
    plain(**batch_of(0)).loss.backward()
    expected = {name: plain.get_parameter(path).grad for path, name in trained_names(plain).items()}
    assert expected
    booster = SETTINGS[run].make_booster()
    model = adapted(kind, booster)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))  # lists the base, too
    backward(booster, model, optimizer, batch_of(0, *booster.plugin.data_parallel_coordinates(DistCoordinator())))
    gradients = {name: full_gradient(booster, model, name) for name in expected}
    assert_same_tensors(gradients, expected, tolerance_for(torch.float32))
    optimizer.step()
    optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, tmp_path / "safetensors")
    booster.save_lora_as_pretrained(model, tmp_path / "bin", use_safetensors=False)
    booster.save_model(model, tmp_path / "model", shard=True)
    whole = whole_model(booster, model)
    trained, logits = {name: whole[name] for name in expected}, logits_of(model)
    for form in ("safetensors", "bin"):
        assert sorted(path.name for path in (tmp_path / form).iterdir()) == [
            "adapter_config.json",
            f"adapter_model.{form}",
        ]
        loaded = peft.PeftModel.from_pretrained(make_model(kind), str(tmp_path / form), is_trainable=True)
        found = {name: loaded.get_parameter(path).detach() for path, name in trained_names(loaded).items()}
        assert_same_tensors(found, trained, EXACT)
        # Sums over experts may come in another order in this process.
        is_exact = kind not in ("mixtral", "qwen3-moe")
        assert_same_tensors(
            {"logits": logits_of(loaded)}, {"logits": logits}, EXACT if is_exact else tolerance_for(torch.float32)
        )
    booster = RUNS["ddp"].make_booster()
    again, *_ = booster.boost(adapted(kind, booster))
    booster.load_model(again, tmp_path / "model")
    whole = whole_model(booster, again)
    assert_same_tensors({name: whole[name] for name in trained}, trained, EXACT)


# ---- lazy models


@matrix(["single"], run=runs("single", "ddp", "fsdp", "zero1", "zero2", "gemini"))
@on_ranks(num_ranks_of)
def test_new_adapters_of_a_lazy_model_train_as_those_of_an_eager_one(run):
    """Adapters are put in inside of the context, or after it."""

    def train(how):
        booster, config = RUNS[run].make_booster(), lora(modules_to_save=["lm_head"])()
        torch.manual_seed(3)
        with nullcontext() if how == "eager" else LazyInitContext() as context:
            model = tiny_llama()
            if how == "inside":
                model = booster.enable_lora(model, lora_config=config)
        if how != "inside":
            model = booster.enable_lora(model, lora_config=config)
        if how != "eager":
            assert is_lazy(model)
            assert context.run_eagerly == {}
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = [float(step(booster, model, optimizer, batch_of(number))) for number in range(3)]
        return losses, whole_model(booster, model), torch.get_rng_state()

    expected_losses, expected, expected_state = train("eager")
    for how in ("inside", "after"):
        losses, tensors, state = train(how)
        assert losses == expected_losses
        assert_same_tensors(tensors, expected, EXACT)
        assert torch.equal(state, expected_state), "random numbers go on as after eager construction"


# ---- checkpoints of the whole model


def tied_with_adapters(booster):
    return booster.enable_lora(make_model(tie_word_embeddings=True), lora_config=lora()())


def boost(setting):
    booster = setting.make_booster()
    model = perturbed(tied_with_adapters(booster))
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))[:2]


def train(booster, model, optimizer, numbers):
    """Return each step's loss, the same on all ranks."""
    losses = []
    for number in numbers:
        batch = batch_of(number, *booster.plugin.data_parallel_coordinates(DistCoordinator()))
        losses.append(step(booster, model, optimizer, batch))
    return [None if loss is None else float(loss) for loss in losses]


def train_and_save_adapters_alone(setting, folder):
    booster, model, optimizer = boost(setting)
    train(booster, model, optimizer, range(2))
    booster.save_checkpoint(folder, step=2, model=model, optimizer=optimizer, save_frozen=False)
    return train(booster, model, optimizer, range(2, 5))


def resume_adapters(setting, folder, changed=None):
    booster = setting.make_booster()
    model = tied_with_adapters(booster)
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
        ("fsdp", "zero2-three", None),
        ("zero2-three", "gemini", "bf16"),
        ("gemini", "ddp", "bf16"),
        ("ddp", "hybrid-tp", None),
        ("hybrid-tp", "hybrid-pp", None),
        ("hybrid-pp", "zero3", None),
    ],
)
def test_a_step_without_frozen_parameters_goes_on_over_the_same_base(saved, loaded, precision, tmp_path):
    """A base holds other formats under other plugins, and ranks other parts of it."""
    before, after = (replace(SETTINGS[name], precision=precision) for name in (saved, loaded))
    expected = run_on_ranks(train_and_save_adapters_alone, before.num_ranks, before, tmp_path)
    files = list((tmp_path / "step-00000002" / "model").iterdir())
    assert all("lora_" in name for file in files if file.suffix == ".safetensors" for name in load_file(file))
    assert not [file for file in files if file.name == "config.json"], "`from_pretrained` would draw the base"
    found = run_on_ranks(resume_adapters, after.num_ranks, after, tmp_path)
    relative = tolerance_for(torch.float32 if precision is None else torch.bfloat16).relative

    def mean_losses(per_rank):
        known = [losses for losses in per_rank if None not in losses]
        return [sum(losses) / len(losses) for losses in zip(*known, strict=True)]

    assert mean_losses(found) == pytest.approx(mean_losses(expected), rel=relative)
    for changed in ("layers.1.mlp.down_proj.weight", "embed_tokens.weight"):
        match = r"saved without its \d+ frozen parameters .*other values"
        expect_on_ranks(CheckpointError, match, resume_adapters, after.num_ranks, after, tmp_path, changed)


@pytest.mark.parametrize("run", ["single", "zero2-three"])
@on_ranks(num_ranks_of)
def test_the_base_loads_without_adapters(run, tmp_path):
    booster, model, optimizer = boost(SETTINGS[run])
    train(booster, model, optimizer, range(2))
    booster.save_model(model, tmp_path, shard=True)
    plain = make_model(tie_word_embeddings=True)
    original = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.5)
    booster = Booster("cpu")
    with pytest.raises(CheckpointError, match=r"lora_A\.default\.weight"):
        booster.load_model(plain, tmp_path)
    report = booster.load_model(plain, tmp_path, strict=False)
    assert not report.missing
    assert_same_tensors(plain.state_dict(), original, EXACT)
    transformers.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(plain)
    assert_same_tensors(loaded.state_dict(), original, EXACT)


# ---- what is refused


@pytest.mark.parametrize("where", ["checks", "loader"])
@on_ranks(2)
def test_an_error_on_another_rank_leaves_the_optimizer_as_it_was(where):
    rank = DistCoordinator().rank

    class Breaks(torch.utils.data.SequentialSampler):
        """Raises on rank 1 when its order is drawn."""

        def __iter__(self):
            if rank == 1:
                msg = "no such file"
                raise OSError(msg)
            return super().__iter__()

    booster = Booster("cpu", plugin=TorchDDPPlugin())
    model = booster.enable_lora(make_model(), lora_config=lora()())
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


@raises_on_ranks(ConfigError, r"ia3\.layer.*`tp_size=2` splits that layer", 2)
def test_a_layer_with_adapters_that_cannot_be_split_with_it_is_refused():
    model = adapted("ia3")
    booster = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", COMPUTED)
@on_ranks(2)
def test_what_peft_computes_is_saved_by_peft_from_a_saved_model(kind, tmp_path):
    rank = DistCoordinator().rank
    booster, model, optimizer = boosted(RUNS["zero1"], adapted(kind))
    backward(booster, model, optimizer, batch_of(0, rank, 2))
    optimizer.step()
    with pytest.raises(ConfigError, match="save what peft computes"):
        booster.save_lora_as_pretrained(model, tmp_path / "adapter")
    booster.save_model(model, tmp_path / "model")
    expected = logits_of(model)
    model = adapted(kind)
    booster.load_model(model, tmp_path / "model")
    model.save_pretrained(tmp_path / f"adapter-{rank}")
    loaded = peft.PeftModel.from_pretrained(make_model(kind), tmp_path / f"adapter-{rank}")
    assert_same_tensors({"": logits_of(loaded)}, {"": expected}, EXACT)


def of_two_tensors():
    """Return a model with a module under a name that is left out of names, and a tensor of the same name."""
    inner, wrapped = nn.Linear(2, 2), nn.Module()
    wrapped.weight, wrapped._orig_mod = nn.Parameter(torch.ones(2)), inner
    return nn.Sequential(wrapped)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted("ia3").requires_grad_(False), "No adapter of the model is trained"),
        (of_two_tensors, r"name '0\.weight' in files: '0\.weight' and '0\._orig_mod\.weight'"),
    ],
    ids=["frozen", "two tensors of one name"],
)
def test_other_models_are_refused(make, message):
    model = make()
    with pytest.raises(ConfigError, match=message):
        Booster("cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
