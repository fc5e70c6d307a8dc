import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks import Environment, environments
from booster_core.ranks.environments import ALONE, detect

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
KUBEFLOW = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1230042",
    "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NODELIST": "gpu[001-004]",
}  # fmt: skip
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}


@pytest.fixture
def variables(monkeypatch):
    """Set these variables of launchers and no others."""

    def set_variables(values):
        for name in {**TORCHRUN, **SLURM, **OPENMPI, **PMI}:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_variables({})
    return set_variables


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (TORCHRUN, Environment(5, 8, 1, "node0", 29500)),
        (KUBEFLOW, Environment(5, 8, None, "node0", 29500)),
        (SLURM, Environment(5, 8, 1, "gpu003", 15042)),
        ({**SLURM, **MASTER}, Environment(5, 8, 1, "node0", 29500)),
        ({**OPENMPI, **MASTER}, Environment(5, 8, 1, "node0", 29500)),
        ({**PMI, **MASTER}, Environment(5, 8, 1, "node0", 29500)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", **MASTER}, Environment(5, 8, None, "node0", 29500)),
    ],
    ids=["torchrun", "Kubeflow", "SLURM", "SLURM with MASTER_ADDR", "Open MPI", "PMI", "PMI without local ranks"],
)
def test_each_launcher_is_detected(variables, values, expected):
    variables(values)
    assert detect() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**SLURM, **TORCHRUN, "RANK": "3"}, 3),  # srun torchrun
        ({**SLURM, **OPENMPI, **MASTER, "OMPI_COMM_WORLD_RANK": "3"}, 3),  # mpirun, whose daemons are tasks of srun
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", **PMI, **MASTER, "PMI_RANK": "3"}, 3),  # mpiexec, the same
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, 5),  # srun --mpi=pmi2
    ],
)
def test_nested_launchers(variables, values, expected):
    variables(values)
    environment = detect()
    assert (environment.rank, environment.world_size) == (expected, 8)


@pytest.mark.parametrize(
    "values",
    [
        {},
        MASTER,
        {"MASTER_ADDR": "localhost"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_JOB_ID": "7"},  # in a batch script
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_process_that_was_started_alone_trains(variables, values):
    variables(values)
    assert detect() == ALONE
    model, *_ = Booster().boost(torch.nn.Linear(2, 1))
    assert model(torch.ones(3, 2)).shape == (3, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "0"}, "Of torchrun's .*, RANK is set and WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "2"}, "Of torchrun's .*, WORLD_SIZE is set and RANK, MASTER_ADDR and MASTER_PORT are not"),
        ({"LOCAL_RANK": "1"}, "Of torchrun's .*, LOCAL_RANK is set and RANK, WORLD_SIZE, .* are not"),
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "Of srun's .* SLURM_PROCID, SLURM_LOCALID, MASTER_ADDR and MASTER_PORT are not",
        ),
        (OPENMPI, "Of mpirun's .* MASTER_ADDR and MASTER_PORT are not"),
        (PMI, "Of mpiexec's .* MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "many"}, "environment variable WORLD_SIZE='many' is not an integer"),
        ({**TORCHRUN, "RANK": "8"}, r"`rank=8` is out of range of the world: it must be from 0 to 7\."),
        ({**TORCHRUN, "MASTER_PORT": "0"}, r"`port=0` is out of range"),
    ],
)
def test_incomplete_or_wrong_variables(variables, values, words):
    variables(values)
    with pytest.raises(ConfigError, match=words):
        detect()
    with pytest.raises(ConfigError, match=words):
        Booster().boost(torch.nn.Linear(2, 1))


@pytest.mark.parametrize("values", [TORCHRUN, KUBEFLOW, SLURM, {**OPENMPI, **MASTER}, {**PMI, **MASTER}])
def test_one_of_several_processes_does_not_train_a_model_of_its_own(variables, values):
    variables(values)
    words = r"a launcher started 8 processes: .* Call `booster_core\.launch\(\)` and choose a plugin"
    with pytest.raises(ConfigError, match=words):
        Booster().boost(torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],login", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("gpu[12,3]", "gpu12"),
        ("host0,host1", "host0"),
        ("host0 host1", "host0"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("a-b[08-10]-c.example", "a-b08-c.example"),
    ],
)
def test_first_node_of_a_node_list(variables, nodes, first):
    variables({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert environments.from_slurm().address == first


def test_host_and_port_that_are_passed_come_first(variables):
    variables({**SLURM, **MASTER})
    assert environments.from_slurm("head", 1234) == Environment(5, 8, 1, "head", 1234)
    variables(OPENMPI)
    assert environments.from_openmpi("head", 1234) == Environment(5, 8, 1, "head", 1234)
    variables(PMI)
    assert environments.from_pmi("head", 1234) == Environment(5, 8, 1, "head", 1234)


def test_a_pmix_launcher_does_not_tell_the_number_of_ranks(variables, monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    with pytest.raises(ConfigError, match=r"PMIX_RANK=1 is set: .* Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"):
        detect()
    with pytest.raises(ConfigError, match="PMIX_RANK=1 is set"):
        Booster().boost(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("known", [SLURM, {**OPENMPI, **MASTER}, {**PMI, **MASTER}, TORCHRUN])
def test_a_pmix_launcher_below_one_that_tells_it(variables, monkeypatch, known):
    monkeypatch.setenv("PMIX_RANK", "5")
    variables(known)
    assert detect().world_size == 8


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_single_process_of_a_pmix_launcher(variables, monkeypatch, name):
    monkeypatch.setenv("PMIX_RANK", "0")
    variables({name: "1"})
    assert detect() == ALONE
