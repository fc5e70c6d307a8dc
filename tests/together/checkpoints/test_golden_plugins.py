"""A step that one process wrote, loaded under each strategy and saved again, is the same files to the byte."""

from __future__ import annotations

import pytest
from golden_state import Counter, Small, boosted, digests, expected, named, save_run, seed_everything

import booster_runtime
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {"unit_min_numel": 1}, 3),
    "zero1": (LowLevelZeroPlugin, {"stage": 1, "bucket_bytes": 256}, 3),
    "zero2, offload": (LowLevelZeroPlugin, {"stage": 2, "cpu_offload": True}, 2),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 256}, 3),
}


def load_and_save(source, base, name):
    """Load what one process saved, and save it, with an average of the weights that were averaged there."""
    plugin_class, options, _ = PLUGINS[name]
    booster, model, optimizer, loader, scheduler = boosted(plugin_class(**options), Small(), has_states=False)
    booster.register_for_checkpointing(Counter())
    average = booster_runtime.ema(booster, model, 0.5)
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    loaded = booster.load_checkpoint(f"{source}/run", **objects, ema=average)
    seed_everything()
    booster.save_checkpoint(f"{base}/run", step=5, **objects, ema=average, extra=loaded.extra, metric=0.5)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_step_is_the_same_bytes_under_every_plugin(name, tmp_path):
    run_on_ranks(save_run, 1, str(tmp_path / "plain"))
    world_size = PLUGINS[name][2]
    run_on_ranks(load_and_save, world_size, str(tmp_path / "plain"), str(tmp_path / "again"), name)
    wanted = {each: digest for each, digest in expected("run", world_size).items() if each.startswith("run/")}
    assert named(digests(tmp_path / "again"), world_size) == wanted
