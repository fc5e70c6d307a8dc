"""The fenced Python examples of READMEs and docs, each run as the script it is."""

from __future__ import annotations

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


@pytest.mark.parametrize("text", list(_examples()))
def test_an_example_runs_as_it_stands(text, tmp_path):
    if "booster_local_sgd" in text:
        text = f"import sys; sys.path.insert(0, {str(ROOT / 'examples/minimal_plugin/src')!r})\n{text}"
    script = tmp_path / "train.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "launch_from" in text else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "save_model" in text:
        assert any(tmp_path.glob("out*"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
