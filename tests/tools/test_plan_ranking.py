"""Plans are ranked, printed as code, and drawn; what can't be planned says why."""

import os

import pytest
import torch
from command_runs import command_runner
from reference_plugins import ReferencePlugin

from booster_core.errors import ConfigError, PluginError
from booster_testing import close_ranks, run_on_ranks
from booster_tools import TrainingFunctions
from booster_tools.cli import plan as plan_command
from booster_tools.planning import Candidate, Devices, candidates, plan
from booster_tools.planning.processes import in_processes

SCRIPT = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    return model, torch.optim.AdamW(model.parameters())

def batch():
    return torch.zeros(64, 256)

def loss(outputs, batch):
    return outputs.square().mean()
"""
SIZES = ["--devices", "4", "--memory"]


class Configurable(ReferencePlugin):
    """Takes an option, and says which of its settings are worth comparing."""

    name = "configurable"
    api_version = 2

    def __init__(self, *, precision=None, level=0):
        super().__init__(precision=precision)
        if level > 1:
            msg = f"`level={level}` is not 0 or 1."
            raise ConfigError(msg)

    @classmethod
    def settings_to_plan(cls, world_size):
        return [{}, {"level": 1}, {"level": world_size}]


@pytest.fixture(autouse=True)
def _plugins(monkeypatch):
    """Install two plugins, and a third one that is broken."""
    classes = {"configurable": Configurable, "reference": ReferencePlugin}

    def load(name):
        if name not in classes:
            msg = f"No plugin named '{name}' is installed."
            raise PluginError(msg)
        return classes[name]

    listings = [type("Listing", (), {"name": name}) for name in ("broken", *classes)]
    monkeypatch.setattr(candidates, "load", load)
    monkeypatch.setattr(candidates, "installed", lambda: listings)


@pytest.fixture
def run(tmp_path, monkeypatch):
    path = tmp_path / "script_to_rank.py"
    path.write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *options, function="build": command_runner().invoke(
        plan_command.command, [f"{path}:{function}", "--loss", "loss", *options]
    )


def test_settings_of_all_plugins_but_broken_ones_are_compared():
    found = candidates.candidates(4)
    assert [str(each) for each in found] == [
        "configurable()",
        "configurable(level=1)",
        "configurable(level=4)",
        "reference()",
    ]
    with pytest.raises(PluginError, match="'broken'"):
        candidates.candidates(4, ["broken"])


def test_nothing_that_fits_is_an_exit_status(run):
    done = run(*SIZES, "1MiB", "--plugin", "reference")
    assert (done.exit_code, "No setting fits." in done.stdout) == (1, True)
    assert "booster =" not in done.stdout


@pytest.mark.parametrize(
    ("options", "function", "message"),
    [
        ([*SIZES, "80"], "build", "`--memory 80` is not a number with a unit, such as 80GiB"),
        ([*SIZES, "80GiB", "--interconnect", "fast"], "build", "`--interconnect fast` is not a number"),
        ([*SIZES, "1.2.3GiB"], "build", "`--memory 1.2.3GiB` is not a number"),
        ([*SIZES, "80GiB"], "bild", "has no function 'bild'"),
        ([*SIZES, "80GiB", "--plugin", "zerp"], "build", "No plugin named 'zerp' is installed"),
    ],
)
def test_wrong_options_are_named(run, options, function, message):
    done = run(*options, function=function)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(("name", "message"), [("absent.py", "No file '"), ("train.txt", "is not a Python file")])
def test_a_script_that_is_none_is_named(name, message, tmp_path):
    (tmp_path / "train.txt").write_text("")
    done = command_runner().invoke(plan_command.command, [str(tmp_path / name), *SIZES, "80GiB"])
    assert done.exit_code == 2
    assert message in done.stderr


def linear():
    model = torch.nn.Linear(256, 256)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


LINEAR = TrainingFunctions(linear, lambda: torch.zeros(64, 256), lambda outputs, batch: outputs.sum())


def test_settings_that_do_not_fit_come_after_those_that_do():
    devices = Devices(number=4, memory_bytes=2**30)
    found = plan(LINEAR, devices)
    assert [each.fits for each in found.settings] == [True, True, True, False]
    assert found.best is found.settings[0]
    assert found.settings[-1].step_seconds == float("inf")
    slow = Devices(number=4, memory_bytes=2**30, interconnect_bytes_per_second=1e6)
    assert plan(LINEAR, slow, plugins=["reference"]).best.step_seconds > 0.1


def test_what_a_rank_holds_before_its_plan_stops_may_be_too_much(monkeypatch):
    class Exhausting(ReferencePlugin):
        """Asks for more than there is, of memory that plans don't see, as torch's DDP does for very large models."""

        def configure(self, objects, context):
            msg = "can't allocate memory: you tried to allocate 282214825984 bytes"
            raise RuntimeError(msg)

    monkeypatch.setattr(candidates, "load", lambda name: {"exhausting": Exhausting, "reference": ReferencePlugin}[name])
    model_bytes = 4 * 1000 * 1000
    for memory, fits in ((model_bytes // 2, "no"), (10**9, "not planned")):
        found = plan(
            TrainingFunctions(
                lambda: (net := torch.nn.Linear(1000, 1000, bias=False), torch.optim.SGD(net.parameters())),
                lambda: torch.zeros(4, 1000),
            ),
            Devices(number=2, memory_bytes=memory),
            settings=[Candidate(name="exhausting")],
        )
        (setting,) = found.settings
        assert setting.held_bytes >= model_bytes
        assert not setting.fits
        assert setting.is_too_large == (fits == "no")
        assert str(found).splitlines()[1].split()[0] == fits.split()[0]
        assert ("tried to allocate" in str(found)) == (fits != "no")


class Nested(torch.autograd.Function):
    """Computes gradients inside of backward, as nested checkpoints do; autograd starts a thread at the 60th level."""

    @staticmethod
    def forward(ctx, value, depth):
        ctx.depth = depth
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            differentiate(ctx.depth - 1)
        return gradient, None


def differentiate(depth):
    with torch.enable_grad():
        Nested.apply(torch.ones((), requires_grad=True), depth).backward()


def planned_after_threads():
    def work(place):
        differentiate(0)
        return place, os.getpid() == own

    own = os.getpid()
    before = sorted(in_processes(work, 3, 2))
    differentiate(70)
    return before, list(in_processes(work, 3, 2))


def test_settings_are_planned_in_a_process_whose_threads_of_autograd_forks_lack():
    close_ranks()
    try:
        (found,) = run_on_ranks(planned_after_threads, 1)
    finally:
        close_ranks()  # its process has these threads
    assert found == ([(0, False), (1, False), (2, False)], [(0, True), (1, True), (2, True)])
