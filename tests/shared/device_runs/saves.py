"""Saves and loads on a device: values of the save's moment, no wait for the whole device, any stream."""

import contextlib
import threading
from unittest import mock

import torch
from safetensors.torch import load_file

from booster_checkpoint.load import fill
from device_runs.cases import Case
from device_runs.parts import case_of
from device_runs.small import STRATEGIES, Run, adamw, assert_same_bits, spin, under


def save_while_training(setting, *, strategy):
    """Save in the background, go on training at once, and find what a save in the foreground has written before."""
    run = Run(setting, strategy, "bf16", make_optimizer=adamw)
    run.train(2)
    expected = run.parameters("before")
    run.booster.save_optimizer(run.optimizer, setting.folder / "optimizer-before", shard=True)
    waits = []
    spin(setting, 0.05)
    with _refusing_waits_of_other_threads(waits):
        run.booster.save_model(run.model, setting.folder / "model.safetensors", use_async=True)
        run.booster.save_optimizer(run.optimizer, setting.folder / "optimizer", shard=True, use_async=True)
        for number in range(2, 5):
            run.step(number)
        run.booster.wait()
    assert not waits, waits
    assert_same_bits(load_file(setting.folder / "model.safetensors"), expected, "the model")
    found, before = (_read_folder(setting.folder / name) for name in ("optimizer", "optimizer-before"))
    assert_same_bits(found, before, "the optimizer")
    other = Run(setting, strategy, "bf16", make_optimizer=adamw)
    other.booster.load_model(other.model, setting.folder / "model.safetensors")
    other.booster.load_optimizer(other.optimizer, setting.folder / "optimizer")
    third = Run(setting, strategy, "bf16", make_optimizer=adamw)
    third.train(2)
    assert [float(other.step(number)) for number in (2, 3)] == [float(third.step(number)) for number in (2, 3)]


@contextlib.contextmanager
def _refusing_waits_of_other_threads(waits):
    """Note where a thread other than the main one waits for a whole device, which is its current one: the first."""

    def watch(name, function):
        def call(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                waits.append(f"{name}{args} in {threading.current_thread().name}")
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module in (torch.accelerator, torch.cuda):
            name = f"{module.__name__}.synchronize"
            stack.enter_context(mock.patch.object(module, "synchronize", watch(name, module.synchronize)))
        yield


def load_in_a_stream(setting, *, strategy, num_threads):
    """Load in a stream that is busy with kernels that write to the parameters: what was loaded is what stays."""
    run = Run(setting, strategy, make_optimizer=adamw)
    run.train(2)
    expected = run.parameters()
    other = Run(setting, strategy, make_optimizer=adamw)
    stream = setting.module.Stream()
    stream.wait_stream(setting.module.current_stream())
    # Threads share tensors of a mebibyte or more.
    with setting.module.stream(stream), mock.patch.object(fill, "_MIN_THREAD_BYTES", 1 << 10):
        # Kernels of this stream still write to the parameters when the load begins, as an initializer may.
        other.step(0)
        spin(setting, 0.1)
        other.step(1)
        other.booster.load_model(other.model, setting.folder / "parameters.safetensors", num_threads=num_threads)
        found = other.parameters("loaded")
    setting.module.current_stream().wait_stream(stream)
    setting.module.synchronize()
    assert_same_bits(found, expected, "what was loaded in a stream")
    assert_same_bits(other.parameters("later"), expected, "what is there later")


def save_in_a_stream(setting, *, use_async):
    """Save in a stream whose kernels are late."""
    run = Run(setting, STRATEGIES["zero 1"], make_optimizer=adamw)
    run.train(2)
    expected = run.parameters()
    stream = setting.module.Stream()
    stream.wait_stream(setting.module.current_stream())
    adapter = run.booster.state_adapter(run.model)
    with setting.module.stream(stream), torch.no_grad():
        spin(setting, 0.1)
        for shard in adapter.model_shards():
            shard.data.add_(1)
        run.booster.save_model(run.model, setting.folder / "later.safetensors", use_async=use_async)
        for shard in adapter.model_shards():
            shard.data.add_(1)
        run.booster.wait()
    setting.module.current_stream().wait_stream(stream)
    found = load_file(setting.folder / "later.safetensors")
    changed = {name: values + 1 for name, values in expected.items()}
    assert_same_bits(found, changed, "what was saved in a stream")


def _read_folder(folder):
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in load_file(path).items()}


CASES = [
    *(
        case_of(
            f"save while training: {', '.join(names)}",
            [Case(name, save_while_training, under(name)) for name in names],
        )
        for names in (("ddp", "fsdp", "hybrid"), ("zero 2", "zero 2, offload"), ("gemini", "gemini, offload"))
    ),
    case_of(
        "files in a stream of the user",
        [
            *(
                Case(f"load by {threads} threads, {name}", load_in_a_stream, under(name, num_threads=threads))
                for name, threads in (("ddp", 1), ("ddp", 4), ("zero 2", 4), ("gemini", 4), ("fsdp", 4))
            ),
            *(
                Case(f"save{', async' if use_async else ''}", save_in_a_stream, {"use_async": use_async})
                for use_async in (False, True)
            ),
        ],
    ),
]
