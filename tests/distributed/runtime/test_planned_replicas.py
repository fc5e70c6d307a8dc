"""What a plan predicts of replicas in one process is what ranks hold and send, and what arithmetic says."""

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_runtime.planning import measure, predict
from booster_testing import run_on_ranks
from booster_testing.mutants import ReferencePipelinePlugin, ReferencePlugin

WIDTH = 256
NUM_PARAMETERS = 2 * WIDTH * WIDTH + 2 * WIDTH


class Net(nn.Module):
    """Draws, counts and indexes besides its products, on tensors large and small."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        hidden = nn.functional.dropout(torch.relu(self.first(x)), 0.1, self.training)
        return self.second(hidden[torch.arange(len(x) - 1, -1, -1)])


def build():
    model = Net()
    return model, torch.optim.AdamW(model.parameters()), lambda outputs, batch: outputs.square().mean()


def batch():
    return {"x": torch.ones(512, WIDTH)}


def measured(mixed_precision):
    return measure(build, batch, ReferencePlugin(), mixed_precision=mixed_precision)


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_predictions_are_what_ranks_hold_and_send(mixed_precision):
    found, _ = run_on_ranks(measured, 2, mixed_precision)
    predicted = predict(build, batch, ReferencePlugin(), 2, mixed_precision=mixed_precision)
    assert predicted.traffic == found.traffic
    assert predicted.flops == found.flops
    assert predicted.state_bytes == pytest.approx(found.state_bytes, rel=0.01)
    assert predicted.other_bytes == pytest.approx(found.other_bytes, rel=0.01, abs=1 << 16)
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.1)


def test_predictions_are_those_of_arithmetic():
    found = predict(build, batch, ReferencePlugin(), 4, rank=3)
    assert (found.world_size, found.rank) == (4, 3)
    assert found.parameter_bytes == pytest.approx(4 * NUM_PARAMETERS, abs=64)
    assert found.gradient_bytes == pytest.approx(4 * NUM_PARAMETERS, abs=64)
    assert found.optimizer_bytes == pytest.approx(8 * NUM_PARAMETERS, abs=64)
    # All gradients are summed in a ring: each rank sends 3/4 of them twice.
    gradients = found.traffic["all_reduce"]
    assert gradients.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * NUM_PARAMETERS, rel=0.01)
    # Two products forward; both once more for weights, and one for what came before it.
    assert found.flops == 5 * 2 * 128 * WIDTH * WIDTH
    assert found.activation_bytes > 4 * 128 * WIDTH


class Choosing(Net):
    def forward(self, x):
        out = super().forward(x)
        return out[out > 0]


def choosing():
    model = Choosing()
    return model, torch.optim.AdamW(model.parameters()), lambda outputs, batch: outputs.sum()


@pytest.mark.parametrize(
    ("make", "rank", "message"),
    [
        (choosing, 0, "can't be known without computing it"),
        (build, 2, "`rank=2` is not one of the 2"),
        (Net, 0, r"`build` returns \(model, optimizer\).*got `Net`"),
        (lambda: (Net(), None), 0, "got `Net, NoneType`"),
    ],
)
def test_what_can_not_be_planned_says_why(make, rank, message):
    with pytest.raises(ConfigError, match=message):
        predict(make, batch, ReferencePlugin(), 2, rank)


def test_a_pipeline_of_one_stage_is_planned():
    plain = predict(build, batch, ReferencePlugin(), 2)
    found = predict(build, batch, ReferencePipelinePlugin(), 2)
    assert found.traffic["all_reduce"].sent_bytes == pytest.approx(plain.traffic["all_reduce"].sent_bytes, rel=0.01)
    assert found.flops == plain.flops
