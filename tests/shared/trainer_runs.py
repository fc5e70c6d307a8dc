"""Training runs of transformers' Trainer, plain and under a Booster, for tests to compare.

Nothing of transformers is imported before a run: only ranks pay for it.
"""

from pathlib import Path

import torch
from model_zoo import get_model
from named_plugins import make_model, plugin_named

from booster_core import Booster
from booster_testing import run_on_ranks

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


def forget_ranks():
    """Let Accelerate look up its ranks and settings again, as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_trainer(
    name,
    folder,
    *,
    stopped_after=None,
    precision=None,
    model=None,
    num_accumulated=2,
    rows=None,
    compute_loss_func=None,
    **changes,
):
    """Return a Trainer of a global batch under the plugin of a name; ``None`` for one without a Booster.

    Args:
        rows: Samples to train on, in place of those of the causal model; nothing is evaluated then.
    """
    from transformers import Trainer, TrainingArguments

    forget_ranks()
    make, ours, num_processes = Trainer, {}, 1
    if name is not None:
        from booster_trainer import BoosterTrainer

        booster = Booster(plugin=plugin_named(name), mixed_precision=precision)
        num_processes = booster.plugin.data_parallel_coordinates(booster.context.coordinator)[1]
        make, ours = BoosterTrainer, {"booster": booster}
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH
        // (num_processes if rows is None else num_processes * num_accumulated),
        "per_device_eval_batch_size": GLOBAL_BATCH // num_processes,
        "gradient_accumulation_steps": num_accumulated,
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
        train_dataset=samples(20, 1) if rows is None else rows,
        eval_dataset=samples(NUM_EVALUATED, 2) if rows is None else None,
        compute_metrics=metrics_of if rows is None else None,
        compute_loss_func=compute_loss_func,
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


HEADS = {
    "causal": "transformers/llama",
    "sequence": "transformers/bert_classification",
    "reward": "heads/llama_classification",
    "token": "transformers/bert_token_classification",
    "masked": "transformers/bert_masked_lm",
    "question": "transformers/bert_question_answering",
    "choice": "transformers/bert_multiple_choice",
    "bart": "transformers/bart",
    "t5": "transformers/t5_generation",
    "ctc": "transformers/wav2vec2_ctc",
    "image": "transformers/vit_classification",
}
"""Models of the zoo, by head."""


def heads():
    """Return models by head, with samples for each: how their losses are averaged differs."""
    import transformers as hf

    class Routed(hf.LlamaForCausalLM):
        """Adds a loss that is no mean over labels, as models of experts add their router's."""

        def forward(self, input_ids=None, labels=None, **kwargs):
            outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            outputs.loss = outputs.loss + outputs.logits.square().mean()
            return outputs

    found = {}
    for head, name in HEADS.items():
        zoo = get_model(name)
        batch = zoo.share(1, 0, 16)
        if batch.get("labels", torch.ones(1)).dim() > 1:
            for row, labels in enumerate(batch["labels"]):
                labels[-1 - row % 5 :] = -100
        found[head] = zoo.seeded, [{key: value[row] for key, value in batch.items()} for row in range(16)]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    routed = hf.LlamaConfig(vocab_size=64, **sizes, pad_token_id=0)
    scored = found["sequence"][0]().config
    scored.num_labels = 1
    scores = [{**row, "labels": row["input_ids"][0] / 64} for row in found["sequence"][1]]
    found["routed"] = (lambda: Routed(routed), samples(16, 1))
    found["score"] = (lambda: hf.BertForSequenceClassification(scored), scores)
    return found


def train_heads(name, folder, num_accumulated=1, **settings):
    """Return by head the losses and norms of two steps of SGD, and the loss and outputs of an evaluation."""
    found = {}
    token, texts = heads()["token"], heads()["causal"]
    smoothed, own = {"label_smoothing_factor": 0.1}, {"compute_loss_func": mean_over_labels}
    jobs = {head: (*job, {}) for head, job in heads().items()}
    jobs |= {"smoothed": (*texts, smoothed), "smoothed tokens": (*token, smoothed), "own loss": (*token, own)}
    for head, (make, rows, changes) in jobs.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        trainer = make_trainer(
            name,
            folder,
            model=model,
            num_accumulated=num_accumulated,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            warmup_steps=0,
            max_grad_norm=1e9,
            rows=rows,
            **changes,
            **settings,
        )
        trainer.train()
        # of the last batch one rank has fewer samples, or none
        evaluated = tuple(trainer.evaluate(rows[:number])["eval_loss"] for number in (NUM_EVALUATED, 5))
        found[head] = [*((step["loss"], step["grad_norm"]) for step in steps_of(trainer)), evaluated]
    return found


def mean_over_labels(outputs, labels, num_items_in_batch=None):
    """Return a loss of the user's own, which does not look at the number of labels."""
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten())
