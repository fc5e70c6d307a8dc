"""GPTs written by hand, unmodified, train over tensor parallel ranks as in one process: widths taken from the input."""

from __future__ import annotations

import pytest
import torch
from handwritten_gpts import MODELS, Config, policy

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.training import whole_model


def batch(step):
    ids = torch.randint(66, (4, 17), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def seeded(name):
    torch.manual_seed(0)
    return MODELS[name](Config()).double()


def train(name, options, prepare=None):
    plain, original = seeded(name), seeded(name)
    if prepare is not None:
        prepare(original)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, original)]
    booster = Booster("cpu", plugin=HybridParallelPlugin(custom_policy=policy(), **options))
    model, optimizer, *_ = booster.boost(original, optimizers[1])
    for step in range(3):
        (_, loss), (_, found) = plain(*batch(step)), model(*batch(step))
        torch.testing.assert_close(found, loss)
        loss.backward()
        booster.backward(found, optimizer)
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(full_gradient(booster, model, key), parameter.grad, msg=key)
        optimizers[0].step()
        optimizer.step()
        optimizers[0].zero_grad()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[key], parameter.detach(), msg=key)
    logits, _ = model.eval()(batch(0)[0])
    torch.testing.assert_close(logits.clone(), plain(batch(0)[0])[0])


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_one_process_does(name):
    run_on_ranks(train, 2, name, {"tp_size": 2})


def boost_without(fields):
    model = seeded("nanogpt")
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2, custom_policy=policy(**fields))).boost(model)


@pytest.mark.parametrize(
    "fields", [{"local_width": False}, {"scaled": ("n_head",)}, {"scaled": ("n_embd",)}], ids=["width", "embd", "heads"]
)
def test_a_policy_without_one_of_the_fields_raises_with_the_remedy(fields):
    expect_on_ranks(ConfigError, r"layer 'transformer\.h\.0'.*`scaled=`.*`local_width=True`", boost_without, 2, fields)
