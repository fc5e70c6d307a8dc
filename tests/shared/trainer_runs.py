"""Training runs of transformers' Trainer, plain and under a Booster, for tests to compare.

Nothing of transformers is imported before a run: only ranks pay for it.
"""

from pathlib import Path

import torch
from named_plugins import plugin_named

from booster_core import Booster
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

GLOBAL_BATCH = 4
NUM_EVALUATED = 7  # no multiple of the batch, so that ranks repeat a sample


def samples(number, seed):
    """Return samples whose numbers of labels differ."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        tokens = torch.randint(64, (8,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + index % 6] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def stop_after(step):
    """Return a callback that saves and ends a run after a step, as if it had been cut off there."""
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                control.should_save = control.should_training_stop = True

    return StopAfter()


def metrics_of(prediction):
    """Return the sum of predicted tokens, weighted by place, so that order and number of samples count."""
    places = torch.arange(1, len(prediction.predictions) + 1)[:, None]
    tokens = torch.as_tensor(prediction.predictions)
    return {"count": len(tokens), "tokens": int((tokens * places).sum())}


def make_model():
    """Return the same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny_llama()


def forget_ranks():
    """Let Accelerate look up its ranks and settings again, as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_trainer(name, folder, *, stopped_after=None, precision=None, model=None, **changes):
    """Return a Trainer of a global batch under the plugin of a name; ``None`` for one without a Booster."""
    from transformers import Trainer, TrainingArguments

    forget_ranks()
    make, ours, num_processes = Trainer, {}, 1
    if name is not None:
        from booster_tools.integrations.transformers import BoosterTrainer

        booster = Booster(plugin=plugin_named(name), mixed_precision=precision)
        num_processes = booster.plugin.data_parallel_coordinates(booster.context.coordinator)[1]
        make, ours = BoosterTrainer, {"booster": booster}
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH // num_processes,
        "per_device_eval_batch_size": GLOBAL_BATCH // num_processes,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    } | changes
    return make(
        model=make_model() if model is None else model,
        args=TrainingArguments(**settings),
        train_dataset=samples(20, 1),
        eval_dataset=samples(NUM_EVALUATED, 2),
        compute_metrics=metrics_of,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        callbacks=[] if stopped_after is None else [stop_after(stopped_after)],
        **ours,
    )


def steps_of(trainer):
    """Return what a trainer has logged of each step."""
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]


def train(name, folder, *, resume=None, **settings):
    """Train, evaluate and save a model; return losses, norms and learning rates of steps, and the evaluation."""
    trainer = make_trainer(name, folder, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    evaluated = trainer.evaluate()
    trainer.save_model(str(Path(folder) / "out"))
    return steps_of(trainer), {key: evaluated[f"eval_{key}"] for key in ("count", "tokens")}


def saved_parameters(folder):
    """Return the parameters of a saved model, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_parameters(folder, expected):
    [found] = run_on_ranks(saved_parameters, 1, folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
