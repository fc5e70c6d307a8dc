"""Open files of loads from checkpoints of many files."""

import subprocess
import sys


def test_few_files_are_open_however_many_a_checkpoint_has(tmp_path):
    script = """
import os, resource, sys
import torch
from pathlib import Path
from types import SimpleNamespace
from torch import nn
from booster_core import Booster
from booster_core.ranks import DistCoordinator
from booster_checkpoint.files.names import MODEL, FileNames
from booster_checkpoint.save.parts import ModelPart
from booster_checkpoint.save.save import BUCKET_BYTES, Saver
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_checkpoint.load.source import open_source
from booster_core.state import ReplicatedStateAdapter

saver = Saver(Session(DistCoordinator(), timeout_seconds=None), BUCKET_BYTES)
model = nn.ParameterList([nn.Parameter(torch.full((64,), float(index))) for index in range(500)])
adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 48, used + 48))
part = ModelPart(adapter, FileNames(base=MODEL), max_bytes=256)
saver.save([part], target_at(Path(sys.argv[1])), "save")
files = list(Path(sys.argv[1]).glob("*.safetensors"))
assert len(files) == 500, len(files)
with torch.no_grad():
    for parameter in model:
        parameter.zero_()
Booster("cpu").load_model(model, sys.argv[1])
assert all(bool((parameter == index).all()) for index, parameter in enumerate(model))
assert len(os.listdir("/proc/self/fd")) <= used + 1
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
