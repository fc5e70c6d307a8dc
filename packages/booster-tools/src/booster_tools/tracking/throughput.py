"""`Throughput`: what a step got out of the hardware: samples, tokens and operations a second, memory, time for data."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper, as_tuple
from booster_core.precision import NARROW
from booster_tools.flops import MORE_FORMULAS
from booster_tools.tracking.interface import Meter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from booster_core import Booster

_Batch = TypeVar("_Batch")
PEAK_TFLOPS = {
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "A100": (312.0, 19.5),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "MI300X": (1307.0, 163.4),
    "MI250X": (383.0, 95.7),
}
"""Dense peaks of devices in TFLOP/s, by a part of their name, the more special first, from the vendors' data sheets: of
bf16 or fp16 on tensor cores, and of fp32 on ordinary ones."""


class Throughput(Meter):
    """Tells what each step got out of the hardware; pass it to `track` as one of ``meters``.

    Values of a step: ``samples_per_second`` and, of models that take token numbers of shape ``(N, T)`` first,
    ``tokens_per_second``, of all ranks together; ``tflops_per_device``, this rank's; ``mfu``, its part of the device's
    peak, where that is known; ``peak_memory_bytes`` so far, of torch's allocator or else of the process, read once a
    second; and ``data_seconds``, the time spent waiting for batches that came through `batches`.

    Operations are those of the model's forward and backward, without recomputed ones: torch's ``FlopCounterMode``
    counts the first training forward, later ones are in proportion to their elements, and backward is twice the
    forward, less what frozen parameters save. A pipeline runs no forward of the whole model, so it has no rates.

    Example::

        meter = Throughput(booster, model)
        with track(optimizer, JsonLines("runs/1/metrics.jsonl"), meters=[meter]) as run:
            for batch in meter.batches(dataloader):
                ...

    Args:
        booster: Of the run.
        model: The boosted model.
        peak_flops: The device's peak in operations a second at the run's precision; by default that of `PEAK_TFLOPS`.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If the peak is not positive.

    Reference: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv:2204.02311), appendix B.
    """

    def __init__(self, booster: Booster, model: nn.Module, *, peak_flops: float | None = None) -> None:
        if not isinstance(model, ModelWrapper):
            msg = f"`Throughput` needs the model returned by `Booster.boost`; got `{type(model).__name__}`."
            raise TypeError(msg)
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            msg = f"`peak_flops={peak_flops!r}` is no number of operations a second; 312e12 is an A100's in bf16."
            raise ConfigError(msg)
        self._model = model
        self._device = booster.device
        _, self._num_replicas = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
        is_narrow = booster.precision.for_model(model.unwrap()).compute_dtype in NARROW
        self._peak_flops = known_peak_flops(self._device, is_narrow=is_narrow) if peak_flops is None else peak_flops
        parameters = list(model.unwrap().parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        self._passes = 2 + trained / max(1, sum(each.numel() for each in parameters))
        self._handles: list[RemovableHandle] = []
        self._counter: FlopCounterMode | None = None
        self._flops_per_element = 0.0
        self._num_samples = self._num_tokens = self._num_elements = 0
        self._data_seconds = 0.0
        self._peak_memory_bytes = 0.0
        self._seconds_since_read = math.inf

    def start(self) -> None:
        """Begin to count forwards."""
        self._handles = [
            self._model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            self._model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def stop(self) -> None:
        """End counting."""
        for handle in self._handles:
            handle.remove()

    def batches(self, dataloader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of a loader, and count the time spent waiting for them."""
        iterator = iter(dataloader)
        while True:
            started = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._data_seconds += time.perf_counter() - started
            yield batch

    def measure(self, seconds: float, metrics: Mapping[str, Any]) -> Mapping[str, float | Tensor]:
        """Return the values of the step that ended."""
        del metrics
        self._seconds_since_read += seconds
        if self._seconds_since_read >= 1.0:  # on CPUs and on CUDA it takes 0.1 ms
            self._peak_memory_bytes, self._seconds_since_read = float(self._read_peak_memory()), 0.0
        values = {"peak_memory_bytes": self._peak_memory_bytes, "data_seconds": self._data_seconds}
        if self._num_samples:
            values["samples_per_second"] = self._num_samples * self._num_replicas / seconds
        if self._num_tokens:
            values["tokens_per_second"] = self._num_tokens * self._num_replicas / seconds
        if flops := self._flops_per_element * self._num_elements * self._passes:
            values["tflops_per_device"] = flops / seconds / 1e12
            if self._peak_flops is not None:
                values["mfu"] = flops / seconds / self._peak_flops
        self._num_samples = self._num_tokens = self._num_elements = 0
        self._data_seconds = 0.0
        return values

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        given = (leaf for value in (*args, *kwargs.values()) for leaf in as_tuple(value))
        first = next((leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
        if first is None:
            return
        self._num_samples += len(first)
        self._num_elements += first.numel()
        if first.dim() == 2 and not first.is_floating_point():
            self._num_tokens += first.numel()
        if not self._flops_per_element and self._counter is None and first.numel():
            self._counter = FlopCounterMode(display=False, custom_mapping=MORE_FORMULAS)
            self._counter.__enter__()  # type: ignore[no-untyped-call]
            self._flops_per_element = -1.0 / first.numel()  # until the forward has ended

    def _end_forward(self, *_: Any) -> None:
        if self._counter is not None and self._flops_per_element < 0:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._flops_per_element *= -self._counter.get_total_flops()

    def _read_peak_memory(self) -> int:
        read = getattr(torch.get_device_module(self._device), "max_memory_allocated", None)  # neither of CPUs nor MPS
        if read is not None:
            return int(read(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def known_peak_flops(device: torch.device, *, is_narrow: bool) -> float | None:
    """Return a device's peak in operations a second, from `PEAK_TFLOPS`; ``None`` for one that is not there.

    Args:
        device: The device of a run.
        is_narrow: Whether the run computes in bf16 or fp16.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in name), None)
    return None if peaks is None else 1e12 * peaks[0 if is_narrow else 1]
