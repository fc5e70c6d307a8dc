"""Faults that would be silent, and need a card to show."""

from contextlib import nullcontext
from unittest import mock

import device_smoke
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from booster_core.errors import ConfigError
from booster_runtime.memory import locked_buffer
from device_runs.cases import Case

_BYTES = 2 << 20
_BEFORE, _AFTER = (0, 1), (2, 3)
PLUGINS = ("ddp", "fsdp", "zero 2", "gemini", "tensor parallel")


class _Refusing:
    """CUDA's runtime, which has locked the pages already, and so refuses."""

    def __init__(self):
        self._runtime = torch.cuda.cudart()
        self.refused = []

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - CUDA's name
        assert not int(self._runtime.cudaHostRegister(address, num_bytes, flags))
        self.refused.append(int(self._runtime.cudaHostRegister(address, num_bytes, flags)))
        self._runtime.cudaHostUnregister(address)
        return self.refused[-1]


def refuse_to_lock(setting):
    """The first launch after pages could not be locked does not raise for that, and the memory is locked anyway."""
    pages = torch.empty(_BYTES, dtype=torch.uint8)
    torch.cuda.synchronize()
    assert _Refusing().cudaHostRegister(pages.data_ptr(), _BYTES, 0)
    with pytest.raises(RuntimeError):  # else this proves nothing
        torch.ones(1, device=setting.device)
    refusing = _Refusing()
    with mock.patch.object(torch.cuda, "cudart", return_value=refusing):
        buffer = locked_buffer(_BYTES)
    assert len(refusing.refused) == 1
    assert all(refusing.refused)
    found = torch.ones(_BYTES, dtype=torch.uint8, device=setting.device)
    buffer.copy_(found, non_blocking=True)
    torch.cuda.synchronize()
    assert buffer.is_pinned()
    assert bool((buffer == 1).all())


def draw_on_device(setting, *, name):
    """Masks differ between ranks of different samples, are alike between tensor parallel ones, and come back."""
    run = device_smoke.Run(device_smoke.CASES[name], setting.device, "fp32")
    run.step(0)
    state = {"model": run.model, "optimizer": run.optimizer}
    run.booster.save_checkpoint(setting.folder, step=1, **state)
    mask = _mask(setting)
    everyones = [None] * setting.world_size
    dist.all_gather_object(everyones, mask)
    assert (everyones[0] == everyones[1]) == (name == "tensor parallel"), everyones
    assert _mask(setting) != mask
    run.booster.load_checkpoint(setting.folder, **state)
    assert _mask(setting) == mask, "a run that is resumed draws other numbers"


def _mask(setting):
    return functional.dropout(torch.ones(128, device=setting.device)).tolist()


def move_away_and_back(setting, *, name):
    """A boosted model that is moved to the host and back trains on as one that was not; one laid out refuses first."""
    losses = []
    for is_moved in (False, True):
        run = device_smoke.Run(device_smoke.CASES[name], setting.device, "fp32")
        for step in _BEFORE:
            run.step(step)
        if is_moved:
            # Where torch swaps parameters, as on the simulated accelerator, it refuses to move those of DDP's graph.
            is_laid_out = run.model.lays_out
            refusal, text = (ConfigError, "move or cast") if is_laid_out else (RuntimeError, "swap")
            is_refused = is_laid_out or not setting.is_real
            with pytest.raises(refusal, match=text) if is_refused else nullcontext():
                run.model.cpu()
                run.model.to(setting.device)
        losses.append([run.step(step) for step in _AFTER])
    assert losses[0] == losses[1], losses


CASES = [
    Case("silent: a refusal to lock memory", refuse_to_lock, only_on="cuda"),
    *(
        Case(f"silent: {what}, {name}, 2 ranks", function, {"name": name}, ranks=2)
        for what, function in (("random numbers", draw_on_device), ("to the host and back", move_away_and_back))
        for name in PLUGINS
    ),
]
