"""TRL's trainers, SFT, DPO and GRPO, under a plugin: as under Accelerate's DDP on as many ranks."""

import os
from unittest import mock

import pytest
import torch
from isolated_libraries import FOLDER, missing_libraries, use_isolated_libraries
from named_plugins import plugin_named
from trainer_runs import forget_ranks, make_model, steps_of

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["trl", "datasets"])), reason=f"trl not installed, nor in {FOLDER}"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),  # TRL 1.16
]


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _words(generator, number):
    return " ".join(f"w{int(word)}" for word in torch.randint(3, 64, (number,), generator=generator))


def _answers():
    """Return a trainer of fine-tuning, its settings, samples of unequal lengths, and further arguments."""
    from trl import SFTConfig, SFTTrainer

    draw = torch.Generator().manual_seed(1)
    samples = [{"text": _words(draw, 3 + i % 5)} for i in range(12)]
    return SFTTrainer, SFTConfig, {"max_length": 16}, samples, {}


def _preferences():
    """Return the same of DPO; the reference model is a second one."""
    from trl import DPOConfig, DPOTrainer

    draw = torch.Generator().manual_seed(1)
    samples = [
        {"prompt": _words(draw, 3), "chosen": " " + _words(draw, 3 + i % 4), "rejected": " " + _words(draw, 2 + i % 3)}
        for i in range(12)
    ]
    return DPOTrainer, DPOConfig, {"max_length": 32}, samples, {"ref_model": make_model()}


def _rewards():
    """Return the same of GRPO, which generates completions with the model that it trains."""
    from trl import GRPOConfig, GRPOTrainer

    draw = torch.Generator().manual_seed(1)

    def reward(completions, **_):
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    settings = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0}
    samples = [{"prompt": _words(draw, 3 + i % 3)} for i in range(12)]
    return GRPOTrainer, GRPOConfig, settings, samples, {"reward_funcs": reward}


def _tune(kind, names, folder):
    """Return the steps of trainings on as many ranks, one after the other; ``None`` is Accelerate's own."""
    use_isolated_libraries()
    from datasets import Dataset
    from transformers import TrainerCallback

    from booster_trainer import with_booster

    class Seeds(TrainerCallback):
        """Lets a rank draw the same in each training: `boost` gives ranks generators that Accelerate's do not have."""

        def on_step_begin(self, _, state, *__, **___):
            torch.manual_seed(2 * state.global_step + torch.distributed.get_rank())

    found = {}
    rank, world_size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    for name in names:
        forget_ranks()
        # By these Accelerate knows of ranks.
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not used: there is a process group
        make, config, settings, samples, given = kind()
        if name is not None:
            make, given = with_booster(make), {**given, "booster": Booster(plugin=plugin_named(name))}
        common = {
            "output_dir": str(folder / str(name)),
            "per_device_train_batch_size": 2,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
        }
        with mock.patch.dict(os.environ, launched if name is None else {}):
            trainer = make(
                model=make_model(),
                args=config(**common, **settings),
                train_dataset=Dataset.from_list(samples),
                processing_class=_tokenizer(),
                callbacks=[Seeds()],
                **given,
            )
            trainer.train()
        found[name] = steps_of(trainer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_answers, _preferences, _rewards])
def test_losses_are_those_under_accelerate(kind, tmp_path):
    limits = {"timeout_seconds": 280, "group_timeout_seconds": 180}
    names = ["zero", "fsdp", "gemini"]
    for found in run_on_ranks(_tune, 2, kind, [None, *names], tmp_path, **limits):
        expected = found[None]
        assert len(expected) == 3
        assert any(abs(step["grad_norm"]) > 0.1 for step in expected)
        for name in names:
            for own, plain in zip(found[name], expected, strict=True):
                assert own == pytest.approx(plain, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_head_that_is_split_raises_on_every_rank(tmp_path):
    limits = {"timeout_seconds": 280, "group_timeout_seconds": 180}
    assert all(
        expect_on_ranks(ConfigError, "splits them between ranks", _tune, 2, _answers, ["hybrid-tp"], tmp_path, **limits)
    )
