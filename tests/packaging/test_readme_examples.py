"""Run the Python examples in READMEs and docs, each as a script, and check their types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables

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


@pytest.mark.parametrize("text", list(_examples()))
def test_example_runs(text, scripts, tmp_path):
    script = tmp_path / "train.py"
    if "booster_local_sgd" in text:
        text = f"import sys; sys.path.insert(0, {str(ROOT / 'examples/minimal_plugin/src')!r})\n{text}"
    script.write_text(text)
    num_ranks = 2 if "launch_from" in text else 1
    done = scripts.run(script, [[]] * num_ranks, torchrun_variables(num_ranks) if num_ranks > 1 else ())
    assert set(done.codes) == {0}, done.output
    if "save_model" in text:
        assert any(tmp_path.glob("out*"))


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
    scripts = sorted(map(str, tmp_path.glob("*.py")))
    # With our own settings, which are strict: the check of our sources has cached the types of torch for them.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *scripts], check=False, capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
