"""torch's sanitizer of CUDA streams finds no unordered access in three steps with offload."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from device_runs.cases import Case
from device_runs.small import Run, exact_sgd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from device_runs.cases import Setting


@contextlib.contextmanager
def sanitized() -> Iterator[Any]:
    """Let torch raise at a kernel that does not wait for others on its memory, as ``TORCH_CUDA_SANITIZER=1`` does."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    with CUDASanitizerDispatchMode() as mode:
        yield mode


def find_a_race(setting: Setting) -> None:
    """The sanitizer reports a reader that does not wait for a copy: what the other cases look for is found."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    from booster_runtime.memory import CopyStream

    with sanitized():
        copy_stream = CopyStream(torch.device(setting.device))
        source = torch.ones(1 << 20, device=setting.device)
        with copy_stream.after_compute():
            source.add_(1)
        try:
            source.mul_(2)
        except CUDASanitizerErrors:
            return
    msg = "the sanitizer has not seen a race between two streams"
    raise AssertionError(msg)


def train(setting: Setting, *, plugin: str, options: dict[str, Any], on_host: bool = False) -> None:
    """Boost and train three steps under the sanitizer."""
    with sanitized():
        run = Run(setting, plugin, options, "bf16", make_optimizer=exact_sgd)
        if on_host:
            from booster_runtime.activations import enable_activation_offload

            assert enable_activation_offload(run.model, by="Layer", least_bytes=1 << 10)
        losses = [run.step(number) for number in range(3)]
        torch.cuda.synchronize()
    assert all(bool(loss.isfinite()) for loss in losses)


CASES = [
    Case("sanitizer: a race is found", find_a_race, only_on="cuda"),
    *(
        Case(f"sanitizer: {name}", train, {"plugin": plugin, "options": options, "on_host": on_host}, only_on="cuda")
        for name, plugin, options, on_host in (
            ("zero 2, offload", "zero", {"stage": 2, "offload": "cpu"}, False),
            ("gemini, offload", "gemini", {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}, False),
            ("activations on the host", "ddp", {}, True),
        )
    ),
]
