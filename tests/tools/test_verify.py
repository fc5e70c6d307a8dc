"""`verify` finds what a broken plugin gets wrong, by name, and refuses what it can't compare."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import reference_plugins
import torch
from click.testing import CliRunner
from forked_scripts import torchrun_variables
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin, ReferenceStateAdapter
from torch import nn

from booster_core.errors import ConfigError, GradientError
from booster_runtime.collectives import all_gather_object
from booster_runtime.single import SingleDeviceStrategy
from booster_testing.models import TinyMLP
from booster_tools import TrainingFunctions, verify
from booster_tools.cli.verify import command
from booster_tools.rehearsal import random_state_kept

TARGET = torch.linspace(-1, 1, 4)


def mse(outputs, _):
    return (outputs - TARGET).square().mean()


def build(optimizer=torch.optim.AdamW, **options):
    model = TinyMLP()
    return model, optimizer(model.parameters(), **{"lr": 1e-2, **options})


def batch(samples=4):
    return {"x": torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))}


FUNCTIONS = TrainingFunctions(build, batch, mse)


@pytest.mark.parametrize(
    ("plugin_class", "size", "precision"),
    [(ReferencePlugin, 2, None), (SingleDeviceStrategy, 1, "bf16"), (ReferencePipelinePlugin, 2, None)],
)
@on_ranks("size")
def test_a_right_plugin_trains_as_one_process(plugin_class, size, precision):
    before = torch.get_rng_state()
    report = verify(FUNCTIONS, plugin_class(), mixed_precision=precision)
    assert torch.equal(torch.get_rng_state(), before)
    report.check()
    assert "trains as one process does" in str(report)
    found = [(each.what, each.step, each.name) for each in report.differences]
    assert all_gather_object(found) == [found] * size
    assert {what for what, _, _ in found} >= {"initial parameter", "evaluation loss", "loss", "gradient", "update"}
    names = {name for name, _ in TinyMLP().named_parameters()}
    assert {name for what, step, name in found if (what, step) == ("gradient", 2)} == names


class Broken(ReferencePlugin):
    """Spoils the objects that it boosts."""

    api_version = 2

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def configure(self, objects, context):
        self.spoil(objects)
        return super().configure(objects, context)


def scale_one_gradient(objects):
    objects.model.second.weight.register_hook(lambda gradient: gradient * 1.1)


def ignore_weight_decay(objects):
    for group in objects.optimizer.param_groups:
        group["weight_decay"] = 0.0


@torch.no_grad()
def start_elsewhere(objects):
    objects.model.second.weight.add_(0.01)


def compute_in_evaluation(objects):
    objects.model.second.register_forward_hook(lambda module, _, out: out if module.training else 1.01 * out)


def rename_outputs(objects):
    objects.model.register_forward_hook(lambda module, _, out: out if module.training else out[None])


@on_ranks(1)
def test_updates_of_rows_that_few_samples_hit_are_compared_and_what_is_not_is_named():
    class SkipsTheEmbedding(SingleDeviceStrategy):
        """Never updates an embedding, of which each batch hits few rows."""

        api_version = 2

        def configure(self, objects, context):
            table = objects.model.table.weight
            for group in objects.optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not table]
            return super().configure(objects, context)

    class Looking(nn.Module):
        """Has a table, of whose many rows few are looked up, and a bias that the loss hardly follows."""

        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(16384, 8), nn.Linear(8, 4096, bias=False)
            self.ignored = nn.Parameter(torch.zeros(1))
            nn.init.uniform_(self.out.weight, -0.03, 0.03)

        def forward(self, x):
            return self.out(self.table(x)) + 1e-6 * self.ignored

    def verify_looking(plugin):
        functions = TrainingFunctions(
            lambda: (model := Looking(), torch.optim.AdamW(model.parameters(), lr=1e-4)),
            lambda: {"x": torch.arange(4)},
            lambda outputs, _: (outputs - 1).square().mean(),
        )
        report = verify(functions, plugin, mixed_precision="bf16")
        return {found.name for found in report.unexplained if found.what == "update"}, str(report)

    found, text = verify_looking(SingleDeviceStrategy())
    assert not found
    assert "Not compared: updates of parameters whose gradients are rounding errors" in text
    assert text.endswith("'ignored'.")
    found, _ = verify_looking(SkipsTheEmbedding())
    assert found == {"table.weight"}


class _Hides(ReferenceStateAdapter):
    def model_shards(self):
        return (shard for shard in super().model_shards() if shard.name != "second.weight")


class HidesAParameter(ReferencePlugin):
    """Its state adapter shows no shard of a parameter, on any rank."""

    adapter_class = _Hides


@raises_on_ranks(ConfigError, "waits for the ranks of other launches, .* Use its inner", 2)
def test_a_plugin_that_waits_for_other_launches_is_refused():
    plugin = ReferencePlugin()
    plugin.what_to_plan = lambda: "its inner plugin 'ddp'"
    verify(FUNCTIONS, plugin)


@pytest.mark.parametrize(
    ("make_plugin", "what", "name", "make"),
    [
        (partial(Broken, scale_one_gradient), "gradient", "second.weight", build),
        (partial(Broken, ignore_weight_decay), "loss", None, partial(build, torch.optim.SGD, lr=0.1, weight_decay=1.0)),
        (partial(Broken, start_elsewhere), "initial parameter", "second.weight", build),
        (partial(Broken, compute_in_evaluation), "output", None, build),
        (HidesAParameter, "initial parameter", "second.weight", build),
        (partial(Broken, rename_outputs), "output", None, build),
    ],
)
@on_ranks(2)
def test_a_broken_plugin_is_found_and_its_first_fault_is_named(make_plugin, what, name, make):
    report = verify(TrainingFunctions(make, batch, mse), make_plugin())
    with pytest.raises(GradientError, match="differs from one process"):
        report.check()
    found = [(each.what, each.name) for each in report.unexplained]
    assert all_gather_object(found) == [found] * 2
    assert found[0][0] == what
    assert name in (None, found[0][1])


@on_ranks(2)
def test_dropout_is_off_while_it_compares_only():
    made = []

    def build_one():
        made.append(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
        return made[-1], torch.optim.SGD(made[-1].parameters(), lr=0.1)

    functions = TrainingFunctions(
        build_one,
        lambda: torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
        lambda outputs, batch: outputs.square().mean(),
    )
    verify(functions, ReferencePlugin()).check()
    assert [model[1].p for model in made] == [0.5, 0.5]


def unseeded():
    model = TinyMLP()
    with torch.no_grad():
        next(model.parameters()).add_(torch.rand((), generator=torch.Generator().manual_seed(unseeded.calls)))
    unseeded.calls += 1
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


unseeded.calls = 0


def no_optimizer():
    return TinyMLP(), None


REFUSED = {
    "unseeded": (unseeded, torch.zeros(4, 8), mse, "`build` makes other weights each time"),
    "uneven": (build, batch(3), mse, "A batch of 3 samples can't be shared evenly by 2"),
    "no-samples": (build, {"x": torch.tensor(1)}, mse, "A batch of no samples"),
    "not-a-tuple": (TinyMLP, torch.zeros(4, 8), mse, "`build` returns .*; got `TinyMLP`"),
    "no-optimizer": (no_optimizer, torch.zeros(4, 8), mse, "`build` returns .*; got `TinyMLP, NoneType`"),
    "no-loss": (build, torch.zeros(4, 8), None, "have no loss"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_can_not_be_compared_raises_on_every_rank(case):
    make, data, loss, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        verify(TrainingFunctions(make, lambda: data, loss), ReferencePlugin())


@pytest.mark.parametrize(("device", "read"), [("cpu", []), ("cuda:3", [3])])
def test_generators_of_other_devices_are_left_alone(device, read, monkeypatch):
    found, state = [], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda each: found.append(torch.device(each).index) or state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    with random_state_kept(torch.device(device)):
        torch.rand(())
    assert found == read
    assert torch.equal(torch.get_rng_state(), state)


# ---- ``booster verify``: the ranks that it starts, what they print, and the exit status

SCRIPT = """
import torch
from booster_testing.models import TinyMLP

def build():
    model = TinyMLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def batch():
    return {"x": torch.ones(4, 8)}

def loss(outputs, batch):
    return outputs.square().mean()
"""
RANK = f"""
import sys
sys.path.append({str(Path(reference_plugins.__file__).parent)!r})
from reference_plugins import ReferencePlugin
from booster_tools.cli import _verify_rank as rank
rank.load = lambda name: ReferencePlugin
sys.exit(rank.main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def verify_script(tmp_path_factory, scripts):
    """Return a function that runs the ranks of a command under a plugin that is not installed."""
    folder = tmp_path_factory.mktemp("verify")
    script, rank = folder / "train.py", folder / "rank.py"
    script.write_text(SCRIPT)
    rank.write_text(RANK)
    return lambda function, *arguments: scripts.run(
        rank, [[f"{script}:{function}", *arguments]] * 2, torchrun_variables(2)
    )


def test_a_right_plugin_is_verified(verify_script):
    done = verify_script("build", "batch", "loss", "reference", "1", "")
    assert done.codes == [0, 0], done.output
    assert done.output.count("plugin 'reference' on 2 rank(s) trains as one process does") == 1


def test_options_and_mistakes_reach_the_plugin_and_the_user(verify_script):
    for function, option, message in (
        ("absent", "precision=bf16", "has no function 'absent'"),
        ("build", "precision", "`--option precision` is not NAME=VALUE"),
        ("build", "precision=bf15", "bf15"),
    ):
        done = verify_script(function, "batch", "loss", "reference", "1", "", option)
        assert done.codes == [2, 2], done.output
        (line,) = (line for line in done.output.splitlines() if line.startswith("booster verify:"))
        assert message in line


@pytest.mark.parametrize(("returned", "written", "status"), [(0, 1, 1), (0, 0, 0), (3, None, 3)])
def test_the_command_starts_ranks_and_returns_their_status(returned, written, status, monkeypatch, tmp_path):
    started = []

    def run(arguments, check):
        started.append(arguments)
        if written is not None:
            Path(arguments[7]).write_text(str(written))
        return subprocess.CompletedProcess(arguments, returned)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    given = ["train.py:build", "--plugin", "zero", "--option", "stage=2", "--nproc", "4", "--precision", "bf16"]
    assert CliRunner().invoke(command, given).exit_code == status
    ((program, *arguments),) = started
    assert program == sys.executable
    assert arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    rank = "booster_tools.cli._verify_rank"
    assert arguments[4:6] == ["-m", rank]
    assert arguments[7:] == ["train.py:build", "batch", "", "zero", "2", "bf16", "stage=2"]


def test_a_missing_file_is_told_before_ranks_start(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["train.py:build", "--plugin", "zero"])
    assert done.exit_code == 2
    assert "No file 'train.py', of 'train.py:build'" in done.output
