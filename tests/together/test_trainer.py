"""transformers' Trainer under each plugin trains as the plain Trainer does in one process."""

import warnings
from importlib.util import find_spec

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import load_file
from trainer_runs import NUM_EVALUATED, assert_same_parameters, make_model, make_trainer, saved_parameters, train

from booster_core.errors import ConfigError
from booster_testing import run_on_ranks

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("accelerate")), reason="the Trainer needs transformers and accelerate"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    [(steps, evaluated)] = run_on_ranks(train, 1, None, folder)
    return steps, evaluated, run_on_ranks(saved_parameters, 1, folder / "out")[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "plugin", ["zero", "hybrid-tp", *(pytest.param(name, marks=SLOW) for name in ("ddp", "fsdp", "gemini"))]
)
def test_trainer_trains_and_evaluates_as_one_process(plugin, plain, tmp_path):
    steps, evaluated, parameters = plain
    assert len(steps) == 6
    assert evaluated["count"] == NUM_EVALUATED
    assert any(step["grad_norm"] > 0.5 for step in steps), "nothing was clipped"
    for own_steps, own_evaluated in run_on_ranks(train, 2, plugin, tmp_path):
        for own, expected in zip(own_steps, steps, strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
        assert own_evaluated == evaluated
    assert_same_parameters(tmp_path / "out", parameters)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("zero", 2), ("fsdp", 1)),
        pytest.param(("gemini", 2), ("ddp", 2), marks=SLOW),
        pytest.param(("fsdp", 2), ("hybrid-tp", 2), marks=SLOW),
    ],
)
def test_a_run_resumes_under_another_plugin(saved_by, loaded_by, plain, tmp_path):
    steps, _, parameters = plain
    plugin, world_size = saved_by
    run_on_ranks(train, world_size, plugin, tmp_path, stopped_after=4)
    plugin, world_size = loaded_by
    resumed = run_on_ranks(train, world_size, plugin, tmp_path, resume=tmp_path / "checkpoint-4")
    for own_steps, _ in resumed:
        assert [step["step"] for step in own_steps] == [1, 2, 3, 4, 5, 6]
        for own, expected in zip(own_steps, steps, strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
    assert_same_parameters(tmp_path / "out", parameters)


@pytest.mark.parametrize(
    ("plugin", "changes", "message"),
    [
        ("hybrid-pp", {}, "runs this one through a pipeline. Use `pp_size=1`"),
        ("hybrid-tp", {"train_sampling_strategy": "batch_rebalance"}, "ranks of this plugin share batches"),
    ],
)
@on_ranks(2)
def test_arguments_that_contradict_the_plugin_raise_on_every_rank(plugin, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_trainer(plugin, tmp_path, **changes).train()


@raises_on_ranks(ConfigError, "has replaced `LlamaForCausalLM", 2)
def test_a_forward_that_was_replaced_raises_where_layers_are_split(tmp_path):
    model = make_model()
    model.forward = model.forward
    make_trainer("hybrid-tp", tmp_path, model=model).train()


def _make_adapted():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers deprecates
        return get_peft_model(make_model(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


@pytest.mark.skipif(find_spec("peft") is None, reason="adapters are peft's")
@raises_on_ranks(
    ConfigError, r"can't be followed for adapters.*best_model_checkpoint.*enable_lora\(base, pretrained_dir", 2
)
def test_the_best_adapters_are_not_promised(tmp_path):
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    make_trainer("zero", tmp_path, model=_make_adapted(), **best)


def _train_adapters(name, folder, resume=None):
    model = _make_adapted()
    trainer = make_trainer(name, folder, model=model, stopped_after=None if resume else 4)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "out"))


@SLOW
def test_adapters_are_saved_for_peft_and_resume_under_another_plugin(tmp_path):
    pytest.importorskip("peft", reason="adapters are peft's")
    expected, found = tmp_path / "plain", tmp_path / "zero"
    for folder, names, world_size in ((expected, (None, None), 1), (found, ("zero", "fsdp"), 2)):
        run_on_ranks(_train_adapters, world_size, names[0], folder)
        run_on_ranks(_train_adapters, world_size, names[1], folder, str(folder / "checkpoint-4"))
    states = [load_file(folder / "out" / "adapter_model.safetensors") for folder in (expected, found)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
        assert "lora_A" in name or value.abs().sum() > 0
