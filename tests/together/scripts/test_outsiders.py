"""Scripts as users of other libraries write them, under each plugin: as plain PyTorch, or an error with a remedy.

Each script in ``outsiders`` is compared with the same training in plain PyTorch on the batches of all ranks, parameter
by parameter. `RAISING` lists what ends in an error instead.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import plain_training
import pytest
import torch
from named_plugins import make_model
from run_script import run_script
from safetensors.torch import load_file

from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

HERE = Path(__file__).parent / "outsiders"
PLUGINS = ["ddp", "fsdp", "zero", "gemini", "hybrid"]
SPLITS_LAYERS = ["colossal_pipeline", "hf_collator"]
"""Scripts with a model whose layers the hybrid plugin can split; of others it splits the batch."""
PLAIN = {
    "gan": plain_training.gan,
    "gan_of_two_plugins": plain_training.gan,
    "distillation": plain_training.distillation,
    "weighted_sampler": plain_training.weighted_sampler,
    "own_batch_sampler": plain_training.own_batch_sampler,
    "evaluation": plain_training.evaluation,
    "clip_by_torch": plain_training.clip_by_torch,
    "ema_by_deepcopy": plain_training.ema_by_deepcopy,
    "model_module": plain_training.simplest,
    "torch_save": plain_training.torch_save,
    "accumulate": plain_training.accumulate,
    "schedule_by_epoch": plain_training.schedule_by_epoch,
    "accelerate_loop": plain_training.simplest,
    "accelerate_prepare": plain_training.simplest,
    "fabric_loop": plain_training.simplest,
    "fabric_setup": plain_training.simplest,
    "deepspeed_engine": plain_training.simplest,
    "colossal_pipeline": plain_training.colossal_pipeline,
    "hf_collator": plain_training.hf_collator,
    "class_weights": plain_training.class_weights,
    "iterable_dataset": plain_training.iterable_dataset,
    "unseeded": plain_training.unseeded,
    "plain_backward": plain_training.plain_backward,
    "resumed": plain_training.resumed,
    "two_losses": plain_training.two_losses,
    "lightning_module": plain_training.lightning_module,
}
RAISING = {
    "accelerate_loop": (
        "AttributeError",
        r"`Booster` has no `accumulate`; there is `booster_runtime\.accumulate`\.",
        "all",
    ),
    "accelerate_prepare": (
        "AttributeError",
        r"`Booster` has no `prepare`\. .* the documentation's pages 'Moving from",
        "all",
    ),
    "fabric_loop": ("TypeError", r"Booster\.backward\(\) missing 1 required positional argument: 'optimizer'", "all"),
    "fabric_setup": ("AttributeError", r"`Booster` has no `setup`\. .* the documentation's pages 'Moving from", "all"),
    "deepspeed_engine": ("AttributeError", r"object has no attribute 'backward'", "all"),
    "lightning_module": ("ConfigError", r"was called in training, but not through the model that `boost`", "all"),
    "colossal_pipeline": ("ConfigError", r"has no pipeline to execute|`execute_pipeline` needs a pipeline", "all"),
    "model_module-fsdp": ("CheckpointError", r"one rank's shards of the model.*Call `booster\.save_model", "0"),
    "torch_save-fsdp": ("CheckpointError", r"one rank's shards of the model.*Call `booster\.save_model", "0"),
    "model_module-gemini": ("ConfigError", r"'0\.weight' is kept in shards.*`booster\.save_model", "0"),
    "torch_save-gemini-2": ("MissingRanksError", r"`state_dict` #1 timed out .* rank 1 has not reached it", "0"),
    **dict.fromkeys(
        ["clip_by_torch-zero", "clip_by_torch-gemini", "clip_by_torch-hybrid"],
        ("GradientError", r"is split over the ranks.*call `optimizer\.clip_grad_by_norm\(max_norm\)`", "all"),
    ),
    "ema_by_deepcopy-fsdp": ("ConfigError", r"can't be copied.*use `booster_runtime\.ema\(booster, model", "all"),
    "ema_by_deepcopy-gemini": ("ConfigError", r"is kept in shards.*`booster_runtime\.ema\(booster, model\)`", "all"),
    "ema_by_deepcopy-hybrid": ("ConfigError", r"can't be copied.*use `booster_runtime\.ema\(booster, model", "all"),
}
"""The error that ends a script (under one plugin and number of ranks), on all ranks or on those that save.

A script whose rank 0 raises alone ends there: the monitor ends the others.
"""


def cases():
    """Return every script with every plugin on 1 and 2 ranks; all but a covering part are slow."""
    found = []
    for number, script in enumerate(PLAIN):
        for place, plugin in enumerate(PLUGINS):
            for ranks in (1, 2):
                name = "hybrid-tp" if plugin == "hybrid" and ranks == 2 and script in SPLITS_LAYERS else plugin
                # By default each script runs under one plugin on two ranks, and under another on a single rank.
                is_default = place == (number if ranks == 2 else number + 2) % 5
                marks = () if is_default else pytest.mark.slow
                found.append(pytest.param(script, name, ranks, id=f"{script}-{name}-{ranks}", marks=marks))
    return found


def loaded(folder):
    """Return the tensors that a script saved, by `Booster` or by torch."""
    single = Path(f"{folder}.pt")
    if single.exists() and not any(folder.glob("*.safetensors")):
        return torch.load(single)
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.fixture(autouse=True)
def _leave_nothing_behind(monkeypatch, tmp_path):
    """Prevent transformers from leaving loading threads, and torch from setting an environment variable permanently."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(("script", "plugin", "ranks"), cases())
def test_script_equals_plain_torch_or_says_what_to_do(script, plugin, ranks, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    if script == "resumed":
        plain_training.save_for_resumed(out)
    expected_error = next(
        (RAISING[key] for key in (script, f"{script}-{plugin}", f"{script}-{plugin}-{ranks}") if key in RAISING), None
    )
    seconds = 30 if expected_error is None else 8  # that those wait who raise nothing themselves
    path = str(HERE / f"{script}.py")
    errors = run_on_ranks(run_script, ranks, path, plugin, str(out), group_timeout_seconds=seconds)
    if expected_error is not None:
        kind, text, where = expected_error
        for error in errors if where == "all" else errors[:1]:
            assert error is not None
            assert error[0] == kind
            assert re.search(text, error[1])
        return
    assert errors == [None] * ranks
    replicas = 1 if plugin == "hybrid-tp" else ranks
    for subfolder, expected in PLAIN[script](replicas, out).items():
        found = loaded(out / subfolder)
        if script in SPLITS_LAYERS:
            found = type(make_model()).from_pretrained(out).state_dict()
        assert_same_tensors(found, expected, tolerance_for(torch.float32))
    if script == "evaluation":
        expected_metrics = []
        plain_training.evaluation(replicas, out, expected_metrics)
        assert json.loads((out / "metrics.json").read_text()) == pytest.approx(expected_metrics, rel=1e-5)


def start(script, plugin, out, *launcher):
    path = os.pathsep.join([str(HERE.parents[2] / "shared"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *launcher, str(HERE / f"{script}.py"), plugin, str(out)],
        check=False, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("plugin", ["zero", *(pytest.param(name, marks=pytest.mark.slow) for name in PLUGINS[:2])])
def test_one_process_needs_no_launch(plugin, tmp_path):
    done = start("not_launched", plugin, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert_same_tensors(loaded(tmp_path / "out"), plain_training.simplest(1, None)[""], tolerance_for(torch.float32))


@pytest.mark.slow  # test_scripts_started_wrongly.py has the same error, without torchrun
@pytest.mark.parametrize("plugin", ["ddp", *PLUGINS[2:4]])
def test_several_processes_are_told_to_launch(plugin, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = start("not_launched", plugin, tmp_path / "out", *torchrun)
    assert done.returncode != 0
    assert "one of 2, but the process group has not been started. Call `booster_core.launch()` first." in done.stderr
