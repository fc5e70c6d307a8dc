"""Run the Python examples in READMEs and docs, each as a script, and check their types."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)


def _examples():
    for page in PAGES:
        for index, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{index}")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Run the selected examples one after another, each in forks of one process; return folder and outcome by id."""
    home = tmp_path_factory.mktemp("examples")
    texts = {
        item.callspec.id: item.callspec.params["text"]
        for item in request.session.items
        if item.path == Path(__file__) and item.originalname == "test_example_runs"
    }
    jobs = {}
    for number, (name, text) in enumerate(texts.items()):
        folder = home / str(number)
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(text)
        path = [str(ROOT / "examples/minimal_plugin/src")] if "booster_local_sgd" in text else []
        ranks = 2 if "launch_from" in text else 1
        jobs[name] = {"script": str(script), "folder": str(folder), "ranks": ranks, "path": path}
    (home / "jobs.json").write_text(json.dumps([*jobs.values()]))
    command = [sys.executable, str(ROOT / "tests/shared/forked_scripts.py"), "jobs.json", "results.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=home, stdin=subprocess.DEVNULL, timeout=600, env=environment)
    results = json.loads((home / "results.json").read_text())
    return {name: (Path(job["folder"]), result) for (name, job), result in zip(jobs.items(), results, strict=True)}


@pytest.mark.parametrize("text", list(_examples()))
def test_example_runs(text, runs, request):
    folder, result = runs[request.node.callspec.id]
    assert set(result["codes"]) == {0}, result["output"]
    if "save_model" in text:
        assert any(folder.glob("out*"))


def test_the_first_example_runs_as_a_user_starts_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(next(_examples()).values[0])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


TYPED = """
from booster_core import Booster
from booster_core.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
import torch

for plugin in (LowLevelZeroPlugin(stage=2), GeminiPlugin(max_norm=1.0), TorchFSDPPlugin(max_norm=1.0)):
    print(plugin.describe())


class Mine(TorchDDPPlugin):
    pass


net = torch.nn.Linear(8, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
model, optimizer, _, _, lr_scheduler = Booster(plugin=Mine()).boost(net, sgd, lr_scheduler=scheduler)
optimizer.clip_grad_by_norm(1.0)
lr_scheduler.step()
LowLevelZeroPlugin(stages=2)  # type: ignore[call-arg]
frozen = Booster().boost(net)
frozen.optimizer.step()  # type: ignore[attr-defined]
"""
"""Code that a user's type checker must accept, and lines that it must not: mypy reports unused ignores."""


def test_user_scripts_type_check(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy, which the lint session installs")
    # transformers and peft have type errors of their own.
    skipped = re.compile("import peft|transformers|^def |^class |^ +def ", re.MULTILINE)
    every = [text for param in _examples() if "README" in str(param.id) for text in param.values]
    texts = [text for text in every if "Booster(" in text and not skipped.search(text)]
    assert len(texts) >= 7, "the pages' scripts are found"
    for index, text in enumerate([TYPED, *texts]):
        (tmp_path / f"script_{index}.py").write_text(text)
    sources = [str(path) for path in (*ROOT.glob("packages/*/src"), ROOT / "examples/minimal_plugin/src")]
    scripts = sorted(map(str, tmp_path.glob("*.py")))
    # The types of torch take a minute, and the check of our sources has just cached them.
    cache = ROOT / ".mypy_cache"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--strict", f"--cache-dir={cache}", *scripts],
        check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join(sources)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
