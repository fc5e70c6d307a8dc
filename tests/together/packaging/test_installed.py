"""What a user sees of installed wheels, and of broken third-party plugins."""

from __future__ import annotations

import resource
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAIN = """
import sys, torch
from booster_core import Booster

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin="ddp")
model, optimizer, criterion, _, _ = booster.boost(model, optimizer, torch.nn.MSELoss())
before = {name: value.clone() for name, value in model.state_dict().items()}
loss = criterion(model(torch.ones(2, 4)), torch.zeros(2, 1))
booster.backward(loss, optimizer)
optimizer.step()
assert all(not torch.equal(before[name], new) for name, new in model.state_dict().items())
print("trained", type(booster.plugin).__name__)
"""


def third_party_project(folder, name, distribution, *, hooks=None, body="pass"):
    """Write a third party's project."""
    package = distribution.replace("-", "_")
    class_name = "StrangePlugin"
    hooks = (
        hooks
        or f"""
        from booster_core import hookimpl
        from {package}.plugin import {class_name}

        @hookimpl
        def booster_plugins():
            return [{class_name}]
    """
    )
    plugin = f"""
        from booster_core import Plugin

        class {class_name}(Plugin):
            name = "{name}"
            api_version = 2
            {body}

            def configure(self, objects, context):
                return objects
    """
    project = f"""
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [project]
        name = "{distribution}"
        version = "3.1"
        dependencies = ["booster-core"]
        [project.entry-points."booster.plugins"]
        {name} = "{package}.hooks"
    """
    files = {
        "pyproject.toml": project,
        f"src/{package}/__init__.py": "",
        f"src/{package}/hooks.py": hooks,
        f"src/{package}/plugin.py": plugin,
    }
    for path, text in files.items():
        (folder / distribution / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / distribution / path).write_text(textwrap.dedent(text))
    return folder / distribution


@pytest.mark.slow  # test_core_alone.py trains in such an environment
def test_core_alone_trains_on_one_device_and_names_what_to_install(build_wheel, environment_of):
    environment = environment_of(build_wheel(ROOT / "packages" / "booster-core"))
    assert environment.booster("plugins").stdout == "No plugin is installed. Run `pip install booster-ddp`.\n"
    done = environment.run("-c", TRAIN.replace('plugin="ddp"', ""))
    assert done.stdout == "trained SingleDevicePlugin\n"
    done = environment.run("-c", TRAIN, check=False)
    assert "PluginError: Plugin 'ddp' is in booster-ddp, which is not installed." in done.stderr


def test_core_and_ddp_alone_train(core_and_ddp, environment_of):
    environment = environment_of(*core_and_ddp)
    assert environment.run("-c", TRAIN).stdout == "trained TorchDDPPlugin\n"
    assert "inspect" in environment.booster("--help").stdout  # a verb of booster-checkpoint


def test_import_of_a_missing_plugin_class_names_its_distribution(core_and_ddp, environment_of):
    environment = environment_of(*core_and_ddp)
    environment.run("-c", "from booster_core.plugin import TorchDDPPlugin")
    done = environment.run("-c", "from booster_core.plugin import GeminiPlugin", check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "GeminiPlugin is in booster-gemini, which is not installed. Run `pip install booster-gemini`.\n"
    )


@pytest.mark.slow  # five wheels; tests of discovery find the same errors in one process
def test_broken_third_party_plugins_are_listed_with_their_errors(build_wheel, core_and_ddp, environment_of, tmp_path):
    projects = [
        third_party_project(tmp_path, "torn", "strange-syntax", hooks="def booster_plugins(:"),
        third_party_project(tmp_path, "twin", "strange-first"),
        third_party_project(tmp_path, "twin", "strange-second"),
        third_party_project(tmp_path, "future", "strange-version", body="api_version = 999"),
    ]
    environment = environment_of(*core_and_ddp, *map(build_wheel, projects))
    lines = environment.run(environment.bin / "booster", "plugins", "--load", check=False).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert len(lines) == 1 + 6
    assert "strange-syntax" in rows["torn"]
    assert "could not be imported: SyntaxError: " in rows["torn"]
    assert "hooks.py, line 1)" in rows["torn"]
    for line in lines:
        if line.startswith("twin"):
            assert "'twin' is used by" in line
            assert "strange-first 3.1" in line
            assert "strange-second 3.1" in line
    assert "was written for version 999 of the plugin interface" in rows["future"]
    assert rows["ddp"].split()[3] == "TorchDDPPlugin"
    assert environment.run("-c", TRAIN).stdout == "trained TorchDDPPlugin\n"
    without = (
        "import sys; from booster_core.plugin import TorchDDPPlugin; print([n for n in sys.modules if 'strange' in n])"
    )
    assert environment.run("-c", without).stdout == "[]\n"


def test_listing_plugins_is_fast(core_and_ddp, environment_of):
    environment = environment_of(*core_and_ddp)
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment.booster("plugins")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Time of the processor, and the fastest of five: what else the machine does can only slow it down.
    assert min(times) < 0.3


@pytest.mark.slow  # the one with DDP is above, and CI runs each package's tests from its wheel
@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("zero", "LowLevelZeroPlugin"),
        ("fsdp", "TorchFSDPPlugin"),
        ("gemini", "GeminiPlugin"),
        ("hybrid", "HybridParallelPlugin"),
    ],
)
def test_each_plugin_trains_from_its_wheel(build_wheel, core_and_ddp, environment_of, name, class_name):
    needed = ["booster-zero"] if name in ("gemini", "hybrid") else []
    wheels = [build_wheel(ROOT / "packages" / each) for each in (*needed, f"booster-{name}")]
    environment = environment_of(*core_and_ddp, *wheels)
    assert environment.run("-c", TRAIN.replace('"ddp"', f'"{name}"')).stdout == f"trained {class_name}\n"
