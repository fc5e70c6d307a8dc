"""docs/start.md, followed word for word by a user who has only the wheels of the packages that it installs."""

import os
import re

import pytest
from page_blocks import ROOT, blocks_of, write_files

PAGE = "docs/start.md"
STEPS = [20, 40, 60, 80, 100]


def _follow(environment, folder):
    """Run the page's commands in their order, and return what they printed."""
    write_files(PAGE, folder)
    # What pip makes of torch's own entry point; torch is in a folder that all environments share.
    torchrun = environment.bin / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec "{environment.python}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(environment.bin), "/usr/bin", "/bin"])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = []
    for block in blocks_of(ROOT / PAGE):
        if block.language == "bash" and not block.text.startswith("pip install"):
            done = environment.run(
                "-c",
                f"import subprocess, sys; sys.exit(subprocess.call(['bash', '-euc', {block.text!r}]))",
                cwd=folder,
                env={**variables, "PATH": path, "OMP_NUM_THREADS": "1"},
                timeout=600,
            )
            printed.append(done.stdout)
    return printed


@pytest.mark.slow  # eleven processes that each import torch
def test_a_new_user_trains_resumes_and_generates(build_wheel, environment_of, tmp_path):
    (install,) = (b.text for b in blocks_of(ROOT / PAGE) if b.language == "bash" and b.text.startswith("pip install"))
    named = [name for name in install.split()[2:] if name.startswith("booster-")]
    wheels = {*named, "booster-checkpoint", "booster-core", "booster-runtime"}  # each plugin requires these
    environment = environment_of(*(build_wheel(ROOT / "packages" / name) for name in sorted(wheels)))
    plugins, *training, generated = _follow(environment, tmp_path)

    with_plugins = set(named) - {"booster-core", "booster-tools"}
    assert all(f"{name.removeprefix('booster-')} " in plugins for name in with_plugins)
    assert "work" in plugins.splitlines()[-1]  # the doctor's verdict
    text = "".join(training)
    assert [int(step) for step in re.findall(r"^resumed after step (\d+)$", text, re.MULTILINE)] == STEPS[:-1]
    losses = re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE)
    assert [int(step) for step, _ in losses] == STEPS
    values = [float(loss) for _, loss in losses]
    assert values == sorted(values, reverse=True)
    assert generated.startswith("b'In the ")
