import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.launch import launched_world_size

VARIABLES = ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"]


@pytest.fixture(autouse=True)
def _unlaunched(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("WORLD_SIZE", r"launch_from_torch\(\)"),
        ("SLURM_STEP_NUM_TASKS", r"launch_from_slurm\(host, port\)"),
        ("OMPI_COMM_WORLD_SIZE", r"launch_from_openmpi\(host, port\)"),
    ],
)
def test_one_of_several_processes_does_not_train_a_model_of_its_own(monkeypatch, name, call):
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=rf"a launcher started 4 processes: .* Call `{call}` and choose a plugin"):
        Booster().boost(torch.nn.Linear(2, 1))


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["1", "", "many"])
def test_a_process_that_was_started_alone_trains(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert launched_world_size()[0] == 1
    model, *_ = Booster().boost(torch.nn.Linear(2, 1))
    assert model(torch.ones(3, 2)).shape == (3, 1)
