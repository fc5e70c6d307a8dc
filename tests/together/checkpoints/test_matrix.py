"""Checkpoints of every strategy in its variants load on one device, and those of one device under every strategy.

The state is compared bit for bit, and then the next step. The conformance kit tests each plugin's usual settings so, in
each precision; here are other numbers of ranks, other options, and optimizers of whole matrices. Any two exchange
checkpoints, as both do with one device.
"""

from matrix import matrix

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_testing import checkpoint_runs, run_on_ranks
from booster_testing.checkpoint_conformance import assert_same_next_step, assert_same_state, saved_on_one_device
from booster_testing.models import TinyStateful
from booster_testing.training import Training
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "ddp x3": (TorchDDPPlugin, {}, 3),
    "fsdp x1": (TorchFSDPPlugin, {"unit_min_numel": 1}, 1),
    "fsdp x3": (TorchFSDPPlugin, {}, 3),
    "fsdp x4, replicas": (TorchFSDPPlugin, {"replica_size": 2, "ignored_modules": ["LayerNorm"]}, 4),
    "fsdp x2, whole": (TorchFSDPPlugin, {"partition": "parameter"}, 2),
    "zero1 x1, cpu_offload": (LowLevelZeroPlugin, {"stage": 1, "cpu_offload": True}, 1),
    "zero2 x3": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 3),
    "gemini x1, disk": (GeminiPlugin, {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}, 1),
    "gemini x3, whole": (GeminiPlugin, {"min_chunk_bytes": 256, "partition": "parameter"}, 3),
}
SHARDED = ["fsdp x3", "fsdp x4, replicas", "zero2 x3", "gemini x3, whole"]
CASES = [(name, "adamw") for name in RUNS]
CASES += [(name, optimizer) for name in SHARDED for optimizer in ("adafactor", "muon")]
DEFAULT = ["fsdp x1-adamw", "zero1 x1, cpu_offload-adamw", "fsdp x3-muon", "zero2 x3-muon"]


def training_of(name, optimizer, folder):
    plugin_class, options, _ = RUNS[name]
    if "offload_param_frac" in options:
        options = {**options, "offload_dir": str(folder)}
    return Training(plugin_class=plugin_class, options=options, optimizer=optimizer, model_factory=TinyStateful)


@matrix(DEFAULT, **{"name, optimizer": CASES})
def test_checkpoint_loads_on_one_device(name, optimizer, tmp_path):
    training = training_of(name, optimizer, tmp_path)
    saved = run_on_ranks(checkpoint_runs.save_and_continue, RUNS[name][2], training, str(tmp_path / "run"))
    one = checkpoint_runs.on_one_device(training)
    (loaded,) = run_on_ranks(checkpoint_runs.load_and_continue, 1, one, str(tmp_path / "run"))
    assert_same_state(loaded.snapshot, saved[0].snapshot)
    assert_same_next_step(saved, loaded, None)


@matrix(DEFAULT, **{"name, optimizer": CASES})
def test_checkpoint_of_one_device_loads(name, optimizer, tmp_path, tmp_path_factory):
    training = training_of(name, optimizer, tmp_path)
    expected, root = saved_on_one_device(checkpoint_runs.on_one_device(training), tmp_path_factory)
    loaded = run_on_ranks(checkpoint_runs.load_and_continue, RUNS[name][2], training, root)
    for of_rank in loaded:
        assert_same_state(of_rank.snapshot, expected.snapshot)
    assert_same_next_step(loaded, expected, None)
