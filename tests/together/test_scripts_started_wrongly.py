"""Scripts that don't fit the way they were started: each rank says so, and all end."""

import re
import textwrap

import pytest
from forked_scripts import torchrun_variables
from matrix import matrix

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def run(scripts, tmp_path, body, environments, monkeypatch):
    """Run a script that prints the type and text of the error it ends by, on whichever rank."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    indented = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    script.write_text(
        "import os, time, torch\n"
        "from pathlib import Path\n"
        "from booster_core import Booster, launch_from_torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        f"try:\n{indented}\n"
        "except Exception as error:\n"
        "    line = f\"RANK {os.environ.get('RANK')} {type(error).__name__}: {error}\\n\"\n"
        "    os.write(1, line.encode())\n"
        # The first to end must not end the others before each has said its error.
        "    Path(f\"said-{os.environ.get('RANK')}\").touch()\n"
        f"    while len(list(Path().glob('said-*'))) < {len(environments)}:\n"
        "        time.sleep(0.05)\n"
        "    raise\n"
    )
    done = scripts.run(script, [[]] * len(environments), environments)
    assert 0 not in done.codes, done.output
    return re.findall(r"^RANK (\w+) (\w+): (.*)$", done.output, re.MULTILINE), done.output


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("Booster(plugin='ddp').boost(model)", r"Call `booster_core\.launch\(\)` first"),
        pytest.param(
            "Booster().boost(model)",
            "a launcher started 2 processes: each would train a model of its own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            """
            launch_from_torch()
            Booster().boost(model)
            """,
            r"but 2 ranks were launched: .* Choose a plugin, for example `Booster\(plugin='ddp'\)`",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ddp without launch", "no plugin, without launch", "no plugin"],
)
def test_every_rank_says_what_to_do(scripts, tmp_path, monkeypatch, body, words):
    errors, _ = run(scripts, tmp_path, body, torchrun_variables(2), monkeypatch)
    assert {kind for _, kind, _ in errors} == {"ConfigError"}
    assert sorted(rank for rank, _, _ in errors) == ["0", "1"]
    for _, _, text in errors:
        assert re.search(words, text), text


@matrix(["MASTER_PORT"], missing=sorted({*TORCHRUN} - {"LOCAL_RANK"}))
def test_variables_of_torchrun_set_in_part(scripts, tmp_path, monkeypatch, missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    errors, screen = run(scripts, tmp_path, "launch_from_torch()", [environment], monkeypatch)
    assert len(errors) == 1
    assert errors[0][1] == "ConfigError"
    assert re.search(rf"are set and {missing} is not\. Start the script by `torchrun`", errors[0][2])
    assert screen.rstrip().splitlines()[-1].startswith("booster_core.errors.ConfigError: Of torchrun's")
