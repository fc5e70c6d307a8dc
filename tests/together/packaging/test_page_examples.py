"""Run the examples of READMEs and docs, check their types and syntax, and that links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables
from matrix import matrix
from page_blocks import PAGES, ROOT, all_blocks, blocks_of, write_files

LAUNCHERS = ROOT / "tests" / "shared" / "launchers"
"""Stand-ins for the launchers of clusters: they start processes here, with the variables that the real ones set."""


EXAMPLES = [block for block in all_blocks("python") if "not run" not in block.marks]


@matrix(
    [
        "docs/data.md-python-0",
        "docs/plugins/ddp.md-python-0",
        "docs/plugins/fsdp.md-python-1",
        "docs/plugins/hybrid.md-python-1",
        "docs/plugins/index.md-python-0",
        "docs/start.md-python-0",
        "docs/writing-a-plugin.md-python-0",
        "packages/booster-core/README.md-python-0",
        "packages/booster-testing/README.md-python-1",
    ],
    block=[
        pytest.param(block, id=str(block), marks=[pytest.mark.slow] if "slow" in block.marks else [])
        for block in EXAMPLES
    ],
)
def test_example_runs(block, scripts, tmp_path):
    write_files(block.page, tmp_path)
    text = block.text
    if "booster_local_sgd" in text:
        text = f"import sys; sys.path.insert(0, {str(ROOT / 'examples/minimal_plugin/src')!r})\n{text}"
    script = tmp_path / (block.title or "example.py")
    script.write_text(text)
    num_ranks = int(block.marks.get("ranks", 2 if "launch_from" in text else 1))
    done = scripts.run(script, [[]] * num_ranks, torchrun_variables(num_ranks) if num_ranks > 1 else ())
    assert set(done.codes) == {0}, done.output
    if re.search(r'save_model\(model, "out', text):
        assert any(tmp_path.glob("out*"))


def test_the_first_example_runs_as_a_user_starts_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in blocks_of(ROOT / "README.md") if block.language == "python"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _commands():
    """Yield the pages with commands to run; the start page is followed by a test of its own."""
    for page in PAGES:
        commands = [block for block in blocks_of(page) if block.language == "bash" and block.title is None]
        commands = [block for block in commands if "not run" not in block.marks]
        if commands and page.name != "start.md":
            yield pytest.param(commands, id=str(page.relative_to(ROOT)))


@pytest.mark.slow  # new interpreters import torch
@pytest.mark.parametrize("commands", list(_commands()))
def test_commands_of_a_page_run_in_their_order(commands, tmp_path):
    write_files(commands[0].page, tmp_path)
    for launcher in LAUNCHERS.iterdir():
        (tmp_path / "bin").mkdir(exist_ok=True)
        shutil.copy(launcher, tmp_path / "bin")
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in commands:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path, stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [b for b in all_blocks("python") if "not run" in b.marks], ids=str)
def test_syntax_of_examples_that_need_other_machines(block):
    compile(block.text, str(block), "exec")
    assert len(block.marks["not run"]) > 10, "the comment says why"


TYPED = """
from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_zero import LowLevelZeroPlugin
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


TYPED_PAGES = {"docs/data.md", "docs/lazy.md", "docs/precision.md"}
"""Pages whose scripts pass strict checks; others give optimizers a second type, or pass states by `**`."""


@pytest.mark.slow
def test_user_scripts_type_check(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy, which the lint session installs")
    # transformers and peft have type errors of their own.
    skipped = re.compile("import peft|transformers|^def |^class |^ +def ", re.MULTILINE)
    pages = [block for block in EXAMPLES if "README" in block.page or block.page in TYPED_PAGES]
    texts = [block.text for block in pages if "Booster(" in block.text and not skipped.search(block.text)]
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
