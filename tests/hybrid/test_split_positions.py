"""Logits left split by positions: a causal language model takes its own loss in parts, others see the whole."""

from functools import partial

import pytest
import torch
from cases import Setting, assert_equals_one_process, itself, own_loss, zoo_case
from hybrid_runs import MODES, RING, ULYSSES, boosted
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks

from booster_hybrid import HybridParallelPlugin, SplitLogits
from booster_hybrid.sequence_parallel.loss import ByPositions

NAME = "transformers/llama_tied"
TOKENS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def weighted(logits, tokens):
    """A criterion that knows nothing of ranks, with positions weighted differently."""
    weights = torch.linspace(0.5, 2.0, logits.shape[1])
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    return (losses * weights).mean()


def own_and_criterion(outputs, batch):
    labels = batch["labels"]
    criterion = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return outputs.loss + outputs.logits.softmax(-1).square().mean() + criterion


LOSSES = {
    "own": (own_loss, {}),
    "criterion": (lambda outputs, batch: weighted(outputs.logits, batch["input_ids"]), {"labels": None}),
    "criterion-and-labels": (lambda outputs, batch: weighted(outputs.logits.float() * 2.0, batch["labels"]), {}),
    "both": (own_and_criterion, {}),
    "tuple": (lambda outputs, _: sum(part.square().mean() for part in outputs[:2]), {"return_dict": False}),
}


def batch_of(more, number, replica):
    tokens = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(10 * number + replica))
    return {"input_ids": tokens, "labels": tokens, **more}


def loss_named(name, outputs, batch):
    return LOSSES[name][0](outputs, batch)


def assert_same_losses(name, options, num_ranks=2):
    case = zoo_case(NAME, batch=partial(batch_of, LOSSES[name][1]), loss=partial(loss_named, name), steps=2)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, num_ranks))


@matrix(
    ["tuple-all_to_all"],
    name=LOSSES,
    options=named(MODES.values(), MODES),
)
def test_losses_of_all_kinds_are_those_of_one_process(options, name):
    assert_same_losses(name, options)


@matrix(["criterion"], name=LOSSES)
def test_positions_and_vocabulary_may_be_split_at_once(name):
    assert_same_losses(name, {**RING, "tp_size": 2}, 4)


@pytest.mark.parametrize("options", [ULYSSES, RING], ids=["all_to_all", "ring_attn"])
@on_ranks(2)
def test_a_model_sees_whole_logits_before_it_takes_its_loss(options):
    """Add to a model's loss what its last and its first positions predict most surely."""

    class PenalizedForCausalLM(type(get_model(NAME).seeded())):
        def forward(self, input_ids, labels):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
            return loss + weighted(logits, input_ids) + logits[:, -1].logsumexp(-1).square().sum()

    def with_penalty():
        model = get_model(NAME).seeded()
        model.__class__ = PenalizedForCausalLM
        return model

    case = zoo_case(NAME, build=with_penalty, batch=partial(batch_of, {}), loss=itself, steps=2)
    example = {"input_ids": TOKENS, "labels": TOKENS}
    assert_equals_one_process(case, Setting(HybridParallelPlugin, {**options, "example_batch": example}))


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(lambda tp_size: 2 * tp_size)
def test_split_outputs_look_whole(tp_size):
    _, model, _ = boosted(get_model(NAME).seeded(), **RING, tp_size=tp_size)
    whole = get_model(NAME).seeded()(input_ids=TOKENS).logits
    kept = model(input_ids=TOKENS, labels=TOKENS).logits
    assert isinstance(kept, SplitLogits)
    assert isinstance(kept.partition, ByPositions)
    assert kept.local().shape[1] < kept.shape[1] == kept.size(1) == 7
    assert (kept.numel(), len(kept)) == (whole.numel(), 2)
    torch.testing.assert_close(kept.gather()[:], whole)
    torch.testing.assert_close(kept.gather(-1, TOKENS[..., None]), whole.gather(-1, TOKENS[..., None]))
    assert torch.equal(kept.argmax(-1), whole.argmax(-1))
    assert isinstance(kept.detach().to(torch.bfloat16).partition, ByPositions)
    assert "of 7 positions" in repr(kept)
    assert not isinstance(getattr(model(input_ids=TOKENS).logits, "partition", None), ByPositions)
    assert isinstance(kept.local(), SplitLogits) == (tp_size == 2)


@pytest.mark.parametrize("options", [ULYSSES, RING], ids=["all_to_all", "ring_attn"])
@on_ranks(2)
def test_without_labels_the_model_may_be_asked_for_the_last_positions(options):
    _, model, _ = boosted(get_model(NAME).seeded(), **options)
    whole = get_model(NAME).seeded()
    found = model(input_ids=TOKENS, logits_to_keep=1).logits
    torch.testing.assert_close(found[:], whole(input_ids=TOKENS, logits_to_keep=1).logits)


@on_ranks(4)
def test_a_pipeline_returns_whole_logits():
    """The last stage's ranks have them, put together from its microbatches."""
    booster, model, _ = boosted(get_model(NAME).seeded(), **ULYSSES, pp_size=2)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    result = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, return_outputs=True)
    assert (result["outputs"] is not None) == booster.plugin.stage_manager.is_last_stage()
    if result["outputs"] is not None:
        torch.testing.assert_close(result["outputs"].logits[:], get_model(NAME).seeded()(**batch).logits)
