"""GPTs written by hand, unmodified, train over tensor parallel ranks as in one process: widths taken from the input."""

from functools import partial

import pytest
from cases import Case, Setting, assert_equals_one_process
from handwritten_gpts import MODELS, Config, batch, loss_of, policy
from ranked import raises_on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin


def seeded(name):
    return MODELS[name](Config()).double()


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_one_process_does(name):
    case = Case(build=partial(seeded, name), batch=batch, loss=loss_of, outputs=True)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, {"tp_size": 2, "custom_policy": policy()}))


@pytest.mark.parametrize(
    "fields", [{"local_width": False}, {"scaled": ("n_head",)}, {"scaled": ("n_embd",)}], ids=["width", "embd", "heads"]
)
@raises_on_ranks(ConfigError, r"layer 'transformer\.h\.0'.*`scaled=`.*`local_width=True`", 2)
def test_a_policy_without_one_of_the_fields_raises_with_the_remedy(fields):
    model = seeded("nanogpt")
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2, custom_policy=policy(**fields))).boost(model)
