"""How many of our files a save passes, and how deep the write is in them: what a reader has to read."""

import os
import re
import sys
from pathlib import Path

import torch
from torch import nn

from booster_core import Booster
from booster_testing import run_on_ranks

MOST_FILES = 29
MOST_FRAMES = 9
_OURS = re.compile(r"[/\\]((?:booster_(?:core|runtime|checkpoint|zero))[/\\].+\.py)$")


def ours(frame):
    """Return the file of a frame, from its distribution on; ``None`` for others' code."""
    match = _OURS.search(frame.f_code.co_filename)
    return match and match[1]


def trace_save(folder, shard):
    """Save a model under ZeRO; return the files that frames were entered in, and the frames above the deepest write."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    booster = Booster("cpu", None, "zero")
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.backward(model(torch.ones(2, 64)).sum(), optimizer)
    optimizer.step()
    target = str(Path(folder) / ("m" if shard else "m.safetensors"))
    booster.save_model(model, target, shard=shard)  # imports, groups and the ranks' hosts are asked for once
    files, stacks, real = set(), [[]], os.pwrite

    def write(descriptor, content, offset):
        stack, frame = [], sys._getframe(1)
        while frame is not None:
            stack += [f"{ours(frame)}:{frame.f_code.co_name}"] if ours(frame) else []
            frame = frame.f_back
        stacks.append(stack[::-1])
        return real(descriptor, content, offset)

    def profile(frame, event, _):
        if event == "call" and ours(frame):
            files.add(ours(frame))

    os.pwrite = write
    sys.setprofile(profile)
    try:
        booster.save_model(model, target, shard=shard)
    finally:
        sys.setprofile(None)
        os.pwrite = real
    return sorted(files), max(stacks, key=len)


def test_a_model_save_under_zero_passes_few_files(tmp_path):
    for shard in (False, True):
        for files, stack in run_on_ranks(trace_save, 2, str(tmp_path), shard):
            assert 5 < len(files) <= MOST_FILES, "\n".join(files)
            assert 2 < len(stack) <= MOST_FRAMES, stack
