"""Ranks that compute the same train the same, or raise: frozen parameters, penalties, random numbers, values."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from handwritten_gpts import Config, FusedBlock, FusedGPT, policy
from hybrid_runs import RING, SPLIT_GATHER
from ranked import on_ranks, raises_on_ranks
from torch.nn import functional
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import linear_cross_entropy
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

TENSOR = {"tp_size": 2}


class Block(FusedBlock):
    """Drops by a function, of which no module tells."""

    probability = 0.0

    def forward(self, x):
        return super().forward(functional.dropout(x, self.probability, self.training))


class Model(FusedGPT):
    block, is_tied = Block, False

    def forward(self, tokens):
        return super().forward(tokens)[0]


POLICY = ShardingPolicy(rules=policy().rules[:2], layers=("transformer.h",))
"""Splits attention alone."""


def boost(options, probability=0.0):
    torch.manual_seed(0)
    model = Model(Config())
    for block in model.transformer.h:
        block.probability = probability
    tokens = torch.arange(24).view(2, 12) % 16
    booster = Booster("cpu", plugin=HybridParallelPlugin(custom_policy=POLICY, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([{"tokens": each} for each in tokens], batch_size=2)
    return booster, booster.boost(model, optimizer, dataloader=loader), model, tokens


def step(booster, boosted, tokens, penalty=0.0):
    booster.backward(boosted.model(tokens).square().mean() + penalty, boosted.optimizer)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()


@pytest.mark.parametrize("options", [TENSOR, SPLIT_GATHER, RING], ids=["tp", "split_gather", "ring"])
@raises_on_ranks(ConfigError, r"'transformer\.h\.1\.ln_1\.weight' is frozen on rank 0 and trained on rank 1", 2)
def test_what_is_frozen_on_one_rank_alone_raises_on_both(options):
    booster, boosted, model, tokens = boost(options)
    step(booster, boosted, tokens)
    model.transformer.h[1].ln_1.requires_grad_(dist.get_rank() == 1)
    step(booster, boosted, tokens)


@on_ranks(2)
def test_what_is_frozen_and_thawed_on_all_ranks_trains():
    booster, boosted, model, tokens = boost(SPLIT_GATHER)
    for is_frozen in (True, False):
        model.transformer.h[1].ln_1.requires_grad_(not is_frozen)
        step(booster, boosted, tokens)


@pytest.mark.parametrize("options", [TENSOR, SPLIT_GATHER, RING], ids=["tp", "split_gather", "ring"])
@on_ranks(2)
def test_a_first_forward_in_inference_mode_changes_nothing(options):
    """Return the parameters after a step, with and without a first forward in inference mode."""
    found = []
    for infers in (False, True):
        booster, boosted, _, tokens = boost(options)
        if infers:
            with torch.inference_mode():
                boosted.model(tokens)
        step(booster, boosted, tokens)
        found.append(whole_model(booster, boosted.model))
    assert_same_tensors(*found, EXACT)


@pytest.mark.parametrize(("begins_at", "trains"), [(0, True), (2, True), (0, False)], ids=["0", "2", "evaluated"])
@on_ranks(2)
def test_a_penalty_on_a_part_of_a_parameter_raises(begins_at, trains):
    def penalize(names, **options):
        booster, boosted, model, tokens = boost({**TENSOR, **options})
        boosted.model.train(trains)
        for _ in range(begins_at):
            step(booster, boosted, tokens)
        step(booster, boosted, tokens, sum(model.get_parameter(name).norm() for name in names))

    names = ["transformer.wte.weight", "transformer.h.0.attn.c_proj.weight"]
    penalize(names[:1])
    penalize(names, unchecked="allow")
    message = r"reads parameter 'transformer\.h\.0\.attn\.c_proj\.weight' outside .*`weight_decay`"
    with pytest.raises(ConfigError, match=message):
        penalize(names)


@on_ranks(4)
def test_a_penalty_in_the_criterion_of_a_pipeline_raises():
    def penalize(name):
        booster, boosted, model, tokens = boost({**TENSOR, "pp_size": 2})
        for strength in (0.0, 0.1):

            def criterion(outputs, _, strength=strength):
                loss = outputs.square().mean()
                return loss + strength * model.get_parameter(name).norm() if strength else loss

            booster.execute_pipeline(iter([{"tokens": tokens}]), boosted.model, criterion, boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()

    penalize("transformer.h.1.ln_1.weight")
    with pytest.raises(ConfigError, match=r"reads parameter 'transformer\.h\.1\.attn\.c_proj\.weight' outside"):
        penalize("transformer.h.1.attn.c_proj.weight")


PART_OF_TABLE = r"reads parameter '(tokens|lm_head)\.weight' outside of the layer .*`linear_cross_entropy`"


OUTSIDE = {
    "linear": functional.linear,
    "matmul": lambda hidden, weight: hidden @ weight.T,
    "mm": lambda hidden, weight: torch.mm(hidden.flatten(0, 1), weight.t()),
    "einsum": lambda hidden, weight: torch.einsum("bsh,vh->bsv", hidden, weight),
    "lookup": lambda hidden, weight: functional.embedding(torch.zeros(1, dtype=torch.long), weight),
    "index": lambda hidden, weight: weight[torch.zeros(1, dtype=torch.long)],
}

OF_COPIES = {
    "data": lambda hidden, weight: hidden @ weight.data.T,
    "detached": lambda hidden, weight: functional.linear(hidden, weight.detach()),
    "cast": lambda hidden, weight: hidden.double() @ weight.to(torch.float64).T,
    "copied": lambda hidden, weight: hidden @ copy.deepcopy(weight.detach().clone()).T,
    "viewed": lambda hidden, weight: hidden @ weight.view(weight.shape).T,
    "normalized": lambda hidden, weight: hidden @ functional.normalize(weight, dim=-1).T,
    "scaled": lambda hidden, weight: hidden @ (weight * 2).T,
    "row": lambda _, weight: weight[1],
    "written row": lambda _, weight: weight.data.__setitem__(-1, 0.0),
}
"""What a script does without gradients with what it has made of a table."""


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_heads_table_is_read_by_the_head_alone(stage):
    """Train through the head, call it, and read its table by functions, with and without gradients."""
    torch.manual_seed(0)
    model = tiny_llama()
    booster = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2, zero_stage=stage))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    tokens = torch.arange(24).view(2, 12) % 16
    for _ in range(2):
        words = boosted.get_input_embeddings()(tokens)
        booster.backward(boosted(inputs_embeds=words, labels=tokens).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        hidden = model.model(tokens).last_hidden_state
        booster.backward(linear_cross_entropy(hidden, model.lm_head, tokens), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.lm_head(hidden)
        model.lm_head.weight.mul_(0.5).norm()
    for use in OUTSIDE.values():
        for records in (True, False):
            with torch.set_grad_enabled(records), pytest.raises(ConfigError, match=PART_OF_TABLE):
                use(hidden.detach(), model.lm_head.weight)
    for use in OF_COPIES.values():
        with torch.no_grad(), pytest.raises(ConfigError, match=PART_OF_TABLE):
            use(hidden, model.lm_head.weight)
    saved = io.BytesIO()
    torch.save(model.lm_head.weight.detach(), saved)
    saved.seek(0)
    assert type(torch.load(saved, weights_only=True)) is torch.Tensor


@raises_on_ranks(GradientError, r"'transformer\.h\.0\.ln_1\.bias' \(rank 0 against rank 1\)", 2)
def test_copies_that_differ_after_the_first_step_raise():
    booster, boosted, model, tokens = boost(TENSOR)
    with torch.no_grad():
        model.transformer.h[0].ln_1.bias.add_(1e-6 * dist.get_rank())
    step(booster, boosted, tokens)


def drop(options, begins_at, is_seeded):
    """Train with dropout from a step on, where ranks have other generators; return what both ranks hold then."""
    booster, boosted, model, tokens = boost(options)
    torch.manual_seed(7 + dist.get_rank())
    for index in range(3):
        if index == begins_at:
            for block in model.transformer.h:
                block.probability = 0.3
            if is_seeded:
                torch.manual_seed(7)
        step(booster, boosted, tokens)
    return {name: value.clone() for name, value in model.state_dict().items() if "attn" not in name}


@pytest.mark.parametrize(
    ("options", "begins_at", "is_seeded"),
    [(TENSOR, 0, False), (TENSOR, 1, True), (SPLIT_GATHER, 0, False)],
    ids=["tp", "tp-later", "split_gather"],
)
@on_ranks(2)
def test_dropout_by_a_function_keeps_ranks_alike(options, begins_at, is_seeded):
    found = [None, None]
    dist.all_gather_object(found, drop(options, begins_at, is_seeded))
    assert_same_tensors(*found, EXACT)


@on_ranks(2)
def test_dropout_keeps_ranks_alike_without_gradients():
    _, boosted, _, tokens = boost(TENSOR, probability=0.3)
    torch.manual_seed(7 + dist.get_rank())
    found = [None, None]
    with torch.no_grad():
        dist.all_gather_object(found, boosted.model(tokens))
    assert torch.equal(*found)


@raises_on_ranks(ConfigError, "has begun to draw random numbers", 2)
def test_dropout_that_begins_later_raises_where_ranks_draw_apart():
    drop(TENSOR, begins_at=1, is_seeded=False)
