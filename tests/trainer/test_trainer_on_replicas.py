"""transformers' Trainer on replicas: it trains as in one process, resumes, and refuses what contradicts the Booster."""

from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked_scripts import torchrun_variables
from ranked import on_ranks, raises_on_ranks
from trainer_runs import (
    NUM_EVALUATED,
    assert_same_parameters,
    forget_ranks,
    heads,
    make_model,
    make_trainer,
    metrics_of,
    saved_parameters,
    steps_of,
    train,
    train_heads,
)

from booster_core import Booster, LossScaleConfig, PrecisionPolicy
from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.collectives import all_gather_object
from booster_testing import expect_on_ranks, run_on_ranks

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("accelerate")), reason="the Trainer needs transformers and accelerate"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The steps, the evaluation and the parameters of a Trainer without a Booster, which also keeps its second step."""
    folder = tmp_path_factory.mktemp("plain")
    [(steps, evaluated)] = run_on_ranks(train, 1, None, folder)
    return steps, evaluated, run_on_ranks(saved_parameters, 1, folder / "out")[0]


def test_a_run_is_cut_off_and_ends_as_in_one_process(plain, tmp_path):
    steps, evaluated, parameters = plain
    run_on_ranks(train, 2, "reference", tmp_path, stopped_after=4)
    resumed = run_on_ranks(train, 2, "reference", tmp_path, resume=tmp_path / "checkpoint-4")
    for own_steps, own_evaluated in resumed:
        assert [step["step"] for step in own_steps] == [1, 2, 3, 4, 5, 6]
        for own, expected in zip(own_steps, steps, strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
        assert own_evaluated == evaluated
        assert own_evaluated["count"] == NUM_EVALUATED
    assert_same_parameters(tmp_path / "out", parameters)


@pytest.fixture(scope="module")
def plain_heads(tmp_path_factory):
    return run_on_ranks(train_heads, 1, None, tmp_path_factory.mktemp("heads"))[0]


@pytest.mark.parametrize(("num_ranks", "num_accumulated"), [(1, 2), (2, 1), (2, 2)])
def test_each_head_trains_and_is_evaluated_as_by_one_process_at_once(num_ranks, num_accumulated, plain_heads, tmp_path):
    name = "reference" if num_ranks > 1 else "single"
    for found in run_on_ranks(train_heads, num_ranks, name, tmp_path, num_accumulated):
        for head, expected in plain_heads.items():
            for own, known in zip(found[head], expected, strict=True):
                assert own == pytest.approx(known, rel=2e-4), head


def evaluate_seq2seq(name, folder):
    """Return by settings the losses of `evaluate` and `predict` after a training step, and the numbers of predictions.

    Losses without a Booster are those of `Trainer`: `Seq2SeqTrainer` would count the last batch as a full one.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

    from booster_trainer import with_booster

    forget_ranks()
    make, rows = heads()["bart"]
    rows = [{**each, "decoder_input_ids": each["labels"].clamp(min=0).roll(1)} for each in rows]
    plugin = None if name is None else Booster(plugin=name)
    num_ranks = 1 if plugin is None else plugin.context.coordinator.world_size
    found = {}
    for is_generating, smoothing in ((False, 0.0), (True, 0.0), (True, 0.1), (False, 0.1)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        counts = []
        trainer = (Trainer if plugin is None else with_booster(Seq2SeqTrainer))(
            model=model,
            args=Seq2SeqTrainingArguments(
                output_dir=str(folder),
                per_device_train_batch_size=4 // num_ranks,
                per_device_eval_batch_size=4 // num_ranks,
                max_steps=1,
                optim="sgd",
                learning_rate=0.1,
                save_strategy="no",
                predict_with_generate=is_generating,
                generation_max_length=4,
                label_smoothing_factor=smoothing,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=rows[:4],
            compute_metrics=lambda each, counts=counts: (
                counts.append(len(each.predictions[0] if isinstance(each.predictions, tuple) else each.predictions))
                or {}
            ),
            **({} if plugin is None else {"booster": plugin}),
        )
        trainer.train()
        # of the last batch one rank has fewer samples, or none
        for number in (NUM_EVALUATED, 5):
            losses = trainer.evaluate(rows[:number])["eval_loss"], trainer.predict(rows[:number]).metrics["test_loss"]
            found[is_generating, smoothing, number] = *losses, *counts[-2:]
    return found


def test_predictions_of_sequences_have_each_sample_once_and_losses_as_in_one_process(tmp_path):
    from reference_plugins import ReferencePlugin

    [expected] = run_on_ranks(evaluate_seq2seq, 1, None, tmp_path)
    assert {number for *_, number in expected} == {found[-1] for found in expected.values()}
    for found in run_on_ranks(evaluate_seq2seq, 2, ReferencePlugin(), tmp_path):
        for settings, known in expected.items():
            assert found[settings] == pytest.approx(known, rel=1e-4), settings


def train_and_note(trainer, resume=None):
    """Train; return the first token of each sample, by batches."""
    seen, step = [], trainer.training_step

    def noted(model, inputs, *args):
        seen.append(inputs["input_ids"][:, 0].tolist())
        return step(model, inputs, *args)

    with mock.patch.object(trainer, "training_step", noted):
        trainer.train(resume_from_checkpoint=resume)
    return seen


@on_ranks(2)
def test_a_run_resumes_in_the_pass_over_a_stream_in_which_it_stood(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        """Four batches, then the end; another order in each pass."""

        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for number in range(16):
                yield {"input_ids": torch.full((4,), number + 16 * self.epoch), "labels": torch.full((4,), number)}

    def train_on_stream(folder, max_steps, resume=None):
        settings = {"max_steps": max_steps, "save_steps": 3, "save_strategy": "steps", "do_eval": False}
        trainer = make_trainer("reference", folder, rows=Stream(), num_accumulated=1, **settings)
        return train_and_note(trainer, resume)

    whole = train_on_stream(tmp_path / "whole", 9)
    train_on_stream(tmp_path, 3)
    for step in (3, 6):  # in the first pass, and in the second, where the resumed run has saved
        assert train_on_stream(tmp_path, 9, str(tmp_path / f"checkpoint-{step}")) == whole[step:]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@on_ranks(2)
def test_each_sample_comes_once_though_ranks_draw_differently(strategy, tmp_path):
    """In two epochs, which begin after ranks have begun to draw differently."""
    from transformers import TrainingArguments

    changes = {"train_sampling_strategy": strategy}
    if not hasattr(TrainingArguments, "train_sampling_strategy"):  # of early releases
        changes = {"group_by_length": strategy == "group_by_length"}
    rows = [{"input_ids": torch.full((4 + number % 3,), number), "labels": number % 2} for number in range(16)]
    model = heads()["reward"][0]()
    trainer = make_trainer("reference", tmp_path, model=model, rows=rows, num_accumulated=1, **changes)
    trainer.data_collator = lambda samples: {
        "input_ids": torch.stack([each["input_ids"][:4] for each in samples]),
        "labels": torch.tensor([each["labels"] for each in samples]),
    }
    trainer.evaluate(rows[:4])
    seen = [token for batch in train_and_note(trainer) for token in batch]
    (first, drawn), (second, other) = all_gather_object((seen, torch.rand(()).item()))
    assert drawn != other
    for epoch in (slice(0, 8), slice(8, 16)):
        assert sorted(first[epoch] + second[epoch]) == list(range(16))
    assert first[:8] != first[8:]


@on_ranks(1)
def test_the_best_checkpoint_is_loaded_and_an_evaluation_before_changes_nothing(plain, tmp_path):
    by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    trainer = make_trainer("single", tmp_path, **by_epoch, **best)
    trainer.evaluate()
    trainer.train()
    predicted = metrics_of(trainer.predict(trainer.eval_dataset))
    with pytest.raises(ConfigError, match="not gathered on one rank"):
        trainer.accelerator.save_state(str(tmp_path))
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    assert steps_of(trainer) == [pytest.approx(expected, rel=1e-4) for expected in plain[0]]
    assert predicted["count"] == NUM_EVALUATED
    [kept] = tmp_path.glob("checkpoint-*")
    assert kept.name == f"checkpoint-{trainer.state.best_global_step}"


@pytest.mark.parametrize(
    ("precision", "changes", "message"),
    [
        (None, {"bf16": True}, r"bf16=True\)` asks for another precision than the Booster, which"),
        ("bf16", {"fp16": True}, "another precision than the Booster, which computes in bf16"),
        (None, {"fsdp": "full_shard"}, r"fsdp.*can't be followed under a Booster. Leave it out"),
        (None, {"ddp_bucket_cap_mb": 1}, "Pass it to `TorchDDPPlugin`"),
        (None, {"auto_find_batch_size": True}, "would leave the others waiting"),
    ],
)
@on_ranks(2)
def test_arguments_that_contradict_the_booster_raise_on_every_rank(precision, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_trainer("reference", tmp_path, precision=precision, **changes).train()


@raises_on_ranks(ConfigError, "spread over devices when it was loaded", 1)
def test_a_model_that_was_spread_over_devices_is_refused(tmp_path):
    model = make_model()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    make_trainer("single", tmp_path, model=model)


def resume_from_plain(folder):
    make_trainer("reference", folder).train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def test_a_checkpoint_of_the_plain_trainer_raises_on_every_rank(tmp_path):
    run_on_ranks(train, 1, None, tmp_path, stopped_after=2)
    errors = expect_on_ranks(CheckpointError, "no optimizer that a Booster wrote", resume_from_plain, 2, tmp_path)
    assert all(errors)


@on_ranks(2)
def test_a_scheduler_that_one_rank_cannot_read_raises_on_every_rank(tmp_path):
    train("reference", tmp_path, stopped_after=2)
    read = torch.load

    def failing(file, *args, **kwargs):
        if Path(file).name == "scheduler.pt" and torch.distributed.get_rank():
            msg = "the disk of this host is gone"
            raise OSError(msg)
        return read(file, *args, **kwargs)

    trainer = make_trainer("reference", tmp_path)
    with mock.patch.object(torch, "load", failing), pytest.raises(Exception, match="the disk of this host is gone"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@on_ranks(2)
def test_the_scheduler_waits_where_fp16_overflows(tmp_path):
    def rates(initial_scale):
        scaling = LossScaleConfig(initial_scale=initial_scale)
        precision = PrecisionPolicy(compute_dtype=torch.float16, loss_scale=scaling)
        trainer = make_trainer("reference", tmp_path, precision=precision, max_steps=3)
        trainer.train()
        return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]

    assert rates(2.0**32)[:2] == [0.0, 0.0]
    assert rates(2.0**4)[1] > 0.0


ARGUMENTS_FIRST = """
import sys
sys.path[:0] = sys.argv[1:2]
from trainer_runs import make_model, samples
from transformers import TrainingArguments

args = TrainingArguments(output_dir="run", use_cpu=True, report_to="none", max_steps=1, save_strategy="no")
import torch
from booster_core import Booster, launch_from_torch
from reference_plugins import ReferencePlugin
from booster_trainer import BoosterTrainer

assert torch.distributed.is_initialized()
coordinator = launch_from_torch()
booster = Booster(plugin=ReferencePlugin())
trainer = BoosterTrainer(booster=booster, model=make_model(), args=args, train_dataset=samples(4, 1))
trainer.train()
assert (args.world_size, args.process_index, trainer.accelerator.num_processes) == (2, coordinator.rank, 2)
"""


def test_arguments_may_be_made_before_the_launch(scripts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ARGUMENTS_FIRST)
    shared = Path(__file__).parents[1] / "shared"
    done = scripts.run(script, [[str(shared)]] * 2, torchrun_variables(2))
    assert done.codes == [0, 0], done.output


@raises_on_ranks(TypeError, "takes a class derived from `transformers", 1)
def test_other_classes_are_no_trainers():
    from booster_trainer import with_booster

    with_booster(torch.nn.Module)
