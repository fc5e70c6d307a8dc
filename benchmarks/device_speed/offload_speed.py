"""How much of the copies between device and host is hidden where optimizer state is kept, and stepped, on the host.

A step with offload does what one without does, but that the host steps instead of the device, and that gradients go to
the host and parameters back. So the copies' exposed time is what the step with offload takes longer than the step
without, less the device's own update, plus the host's update; both updates and the copies are measured alone, by hand,
in the same rounds.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from device_runs.cases import Case, Figure

from booster_core import Booster
from device_speed.language_models import boosted_step, make_batch, make_llama, make_optimizer, make_plugin, size_of
from device_speed.measuring import Clock, Peak, Results, device_work, forget, in_turns, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from device_runs.cases import Setting

LEAST_HIDDEN = 0.8
_WARM = 3
_CHUNK = 4 << 20
"""Elements of the tensors that are updated by hand."""
WAYS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gemini, all optimizer state on the host": ("gemini", {"offload_optim_frac": 1.0}, 1.0),
    "zero 1, optimizer state on the host": ("zero 1", {"offload": "cpu"}, 1.0),
    "gemini, half of the optimizer state on the host": ("gemini", {"offload_optim_frac": 0.5}, 0.5),
}
"""Plugin, options, and the part of the state that is on the host."""


def hidden_copies(setting: Setting, *, ways: Sequence[str], seconds: float, each: float) -> Sequence[Figure]:
    """Measure steps with offload, steps without, and what they consist of, in turns.

    Args:
        setting: The device.
        ways: Of `WAYS`, the most important first.
        seconds: Of all of it.
        each: Seconds of the rounds of each way.
    """
    results = Results(Clock(setting, seconds))
    if setting.is_real:
        torch.set_num_threads(max((os.cpu_count() or 2) - 2, 1))
    by_hand: dict[float, _ByHand] = {}  # of a fraction of the parameters; allocating takes longer than measuring
    for name, attempt in results.attempts(ways):
        with attempt:
            results.figures += _measure(setting, name, by_hand, each)
        forget(setting)
    return results.end()


def _measure(setting: Setting, name: str, known: dict[float, _ByHand], seconds: float) -> list[Figure]:
    plugin, options, part = WAYS[name]
    without, their_peak, numel = _run(setting, plugin, {})
    step, peak, _ = _run(setting, plugin, options)
    by_hand = known[part] if part in known else known.setdefault(part, _ByHand(setting, int(numel * part)))
    alone = {"host": by_hand.step_on_host, "device": by_hand.step_on_device, "copies": by_hand.copy}
    for action in alone.values():
        action()
    times = in_turns(setting, {"with": step, "without": without, **alone}, seconds)
    rounds = [dict(zip(times, values, strict=True)) for values in zip(*times.values(), strict=True)]
    exposed = [one["with"] - (one["without"] - one["device"] + one["host"]) for one in rounds]
    hidden = [1 - late / one["copies"] for late, one in zip(exposed, rounds, strict=True)]
    what = f"{name}, Llama 500M, bf16 with fp32 masters"
    figures = [
        Figure(f"share of copies hidden, {what}", hidden, unit="", bar=LEAST_HIDDEN, at_least=True),
        Figure(f"step of {what}", times["with"], "the same without offload", times["without"]),
        Figure(f"peak device memory of {what}", [peak], "the same without offload", [their_peak], "B"),
        Figure(f"update on the host alone, {what}", times["host"]),
        Figure(f"update on the device alone, {what}", times["device"]),
        Figure(f"copies alone, {by_hand.num_bytes / 1e9:.2f} GB, {what}", times["copies"]),
    ]
    if work := device_work(setting, step):
        figures.append(Figure(f"copies as the device made them, {what}", [work.link_seconds]))
    return figures


def _run(setting: Setting, plugin: str, options: Mapping[str, Any]) -> tuple[Callable[[], Any], int, int]:
    """Return a step that has been taken some times, the peak of device memory, and the number of parameters."""
    memory = Peak(setting)
    size = size_of(setting, "500M")
    model = make_llama(setting, size)
    numel = sum(parameter.numel() for parameter in model.parameters())
    booster = Booster(setting.device, "bf16", make_plugin(plugin, **options))
    boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
    step = partial(boosted_step(booster, boosted, optimizer), make_batch(setting, size))
    for _ in range(_WARM):
        step()
    synchronize(setting)
    return step, memory.num_bytes, numel


class _ByHand:
    """Masters, moments and gradients of so many parameters, on the host and on the device, without a model.

    Args:
        setting: The device.
        numel: Number of parameters.
    """

    def __init__(self, setting: Setting, numel: int) -> None:
        sizes = [min(_CHUNK, numel - first) for first in range(0, numel, _CHUNK)]
        self._device, self._host = (
            [_Chunk(length, device) for length in sizes] for device in (setting.device, torch.device("cpu"))
        )
        self._optimizers = [
            torch.optim.AdamW([chunk.master for chunk in chunks], lr=1e-4, fused=True)
            for chunks in (self._device, self._host)
        ]
        self.num_bytes = 2 * 2 * numel

    def step_on_host(self) -> None:
        """Update the host's masters, from gradients in bf16 to parameters in bf16."""
        self._step(1, self._host)

    def step_on_device(self) -> None:
        """Update the device's."""
        self._step(0, self._device)

    def _step(self, place: int, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            assert chunk.master.grad is not None
            chunk.master.grad.copy_(chunk.gradient)
        self._optimizers[place].step()
        for chunk in chunks:
            chunk.working.copy_(chunk.master.detach())

    def copy(self) -> None:
        """Copy gradients to the host, then parameters to the device."""
        for above, below in zip(self._device, self._host, strict=True):
            below.gradient.copy_(above.gradient, non_blocking=True)
        for above, below in zip(self._device, self._host, strict=True):
            above.working.copy_(below.working, non_blocking=True)


class _Chunk:
    def __init__(self, numel: int, device: Any) -> None:
        self.master = torch.nn.Parameter(torch.zeros(numel, device=device))
        self.master.grad = torch.zeros(numel, device=device)
        is_host = torch.device(device).type == "cpu"
        self.gradient, self.working = (
            torch.zeros(numel, dtype=torch.bfloat16, device=device, pin_memory=is_host) for _ in range(2)
        )


CASES = [
    Case(
        "speed: copies hidden by offload",
        hidden_copies,
        {"ways": tuple(WAYS), "seconds": 60, "each": 3.0},
        seconds=100,
        is_timed=True,
    )
]
