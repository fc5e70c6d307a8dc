"""How many of our files a save or load passes, and how deep its writes and reads are: what a reader has to read."""

import os
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from file_faults import FileFaults
from torch import nn

from booster_core import Booster
from booster_testing import run_on_ranks

MOST_FILES = {"save_model": 31, "load_model": 32, "save_checkpoint": 49, "load_checkpoint": 45}
MOST_FRAMES = {"save_model": 9, "load_model": 16, "save_checkpoint": 10, "load_checkpoint": 21}
_OURS = re.compile(r"[/\\]((?:booster_(?:core|runtime|checkpoint|zero))[/\\].+\.py)$")


def ours(frame):
    """Return the file of a frame, from its distribution on; ``None`` for others' code."""
    match = _OURS.search(frame.f_code.co_filename)
    return match and match[1]


def calls(booster, model, optimizer, folder, shard):
    """Return the calls that are traced, by their names, in the order in which they can be made."""
    target = f"{folder}/{'m' if shard else 'm.safetensors'}"
    return {
        "save_model": lambda: booster.save_model(model, target, shard=shard),
        "load_model": lambda: booster.load_model(model, target),
        "save_checkpoint": lambda: booster.save_checkpoint(f"{folder}/run", step=1, model=model, optimizer=optimizer),
        "load_checkpoint": lambda: booster.load_checkpoint(f"{folder}/run", model=model, optimizer=optimizer),
    }


def trace_calls(folder, shard):
    """Call each under ZeRO; return the files that frames were entered in, and those above the deepest write or read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    booster = Booster("cpu", None, "zero")
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.backward(model(torch.ones(2, 64)).sum(), optimizer)
    optimizer.step()
    traced = {}
    for name, call in calls(booster, model, optimizer, folder, shard).items():
        call()  # imports, groups and the ranks' hosts are asked for once
        traced[name] = trace(call)
    return traced


def trace(call):
    files, stacks = set(), [[]]

    def noting(real):
        def moved(*args):
            stack, frame = [], sys._getframe(1)
            while frame is not None:
                stack += [f"{ours(frame)}:{frame.f_code.co_name}"] if ours(frame) else []
                frame = frame.f_back
            stacks.append(stack[::-1])
            return real(*args)

        return moved

    def profile(frame, event, _):
        if event == "call" and ours(frame):
            files.add(ours(frame))

    with mock.patch.object(os, "pwrite", noting(os.pwrite)), mock.patch.object(os, "preadv", noting(os.preadv)):
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return sorted(files), max(stacks, key=len)


@pytest.mark.parametrize("shard", [False, True])
def test_calls_under_zero_pass_few_files(shard, tmp_path):
    for traced in run_on_ranks(trace_calls, 2, str(tmp_path), shard):
        for name, (files, stack) in traced.items():
            assert 5 < len(files) <= MOST_FILES[name], "\n".join((name, *files))
            assert 2 < len(stack) <= MOST_FRAMES[name], (name, stack)


class Opened(FileFaults):
    """Notes which files below a folder are opened."""

    def __init__(self, root):
        super().__init__(root, "open")
        self.paths = []

    def check(self, path):
        before = self.count
        super().check(path)
        self.paths += [Path(path)] if self.count > before else []


def test_a_model_load_opens_each_file_once(tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))))
    booster.save_model(model, tmp_path, shard=True, size_per_shard=2)
    with Opened(tmp_path) as opened:
        booster.load_model(model, tmp_path)
    assert len(opened.paths) == 5 + 1  # the index
    assert sorted(opened.paths) == sorted(tmp_path.iterdir())


def test_a_resume_opens_each_file_of_tensors_once_and_small_files_twice(tmp_path):
    """Small files are verified ahead of their use."""
    booster, module = Booster("cpu"), nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), momentum=0.9))
    booster.backward(model(torch.ones(2, 512)).sum(), optimizer)
    optimizer.step()
    booster.save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, size_per_shard=2)
    with Opened(tmp_path) as opened:
        booster.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    counts = Counter(opened.paths)
    step = tmp_path / "step-00000001"
    large = [path for folder in ("model", "optimizer") for path in (step / folder).glob("*.safetensors")]
    assert len(large) == 10
    assert {counts.pop(path) for path in large} == {1}
    assert counts.pop(step / "manifest.json") == 1
    assert counts.pop(tmp_path / "latest") == 1
    assert max(counts.values()) <= 2, counts
