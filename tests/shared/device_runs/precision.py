"""Formats: each plugin's steps in fp32 have the bits of plain torch's, and an overflow in fp16 skips one."""

import pytest
import torch

from device_runs.cases import CannotRun, Case
from device_runs.parts import case_of
from device_runs.small import Run, assert_same_bits, exact_sgd, make_decoder, repeat_bits, tokens_of, under

STEPS = 8


def keep_fp32_bits(setting, *, strategy):
    """With an optimizer that rounds alike, losses and parameters have the bits of those that torch trains by itself."""
    repeat_bits()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_decoder(setting).to(setting.device)
    expected = _train_plainly(setting, model)
    parameters = {name: each.detach().cpu() for name, each in model.named_parameters()}
    run = Run(setting, strategy)
    assert run.train(STEPS) == expected
    found = run.parameters()
    assert_same_bits({name: found[name] for name in parameters}, parameters, "fp32")


def _train_plainly(setting, model, autocast=None):
    optimizer, losses = exact_sgd(model.parameters()), []
    for number in range(STEPS):
        with torch.autocast(setting.device, autocast, enabled=autocast is not None):
            loss = model(tokens_of(number, setting.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def overflow(setting, *, strategy):
    """A loss whose scaled gradients overflow changes nothing but the scale; what follows is as if it had not been."""
    repeat_bits()
    run, other = (Run(setting, strategy, "fp16") for _ in range(2))
    run.train(2)
    other.train(2)
    before = run.parameters("before")
    scale = float(run.optimizer.loss_scaler.scale)
    loss = run.model(tokens_of(2, setting.device)) * 1e6
    run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert float(run.optimizer.loss_scaler.scale) < scale, "an overflow lowers the scale"
    assert_same_bits(run.parameters("after"), before, "a step that was skipped")
    # A power of two less: gradients have the same bits but for what is rounded below the smallest numbers of fp16.
    losses, expected = ([float(each.step(number)) for number in (3, 4)] for each in (run, other))
    assert losses == pytest.approx(expected, rel=2**-9, abs=0.0)


def train_in_8_bits(setting, *, strategy):
    """Linear layers of torchao's under a plugin follow the same layers without one."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        msg = "torchao is not installed"
        raise CannotRun(msg) from error
    if torch.cuda.get_device_capability() < (8, 9):
        msg = "needs compute capability 8.9"
        raise CannotRun(msg)
    from torchao.float8 import convert_to_float8_training

    def converted():
        model = make_decoder(setting)
        convert_to_float8_training(model, module_filter_fn=lambda _, name: "layers" in name)
        return model

    expected = _train_plainly(setting, converted().to(setting.device), torch.bfloat16)
    losses = Run(setting, strategy, "bf16", model=converted()).train(STEPS)
    assert losses == pytest.approx(expected, rel=2**-5, abs=0.0)


CASES = [
    *(
        case_of(
            f"formats: {name}",
            [Case("bits of plain torch", keep_fp32_bits, under(name)), Case("overflow in fp16", overflow, under(name))],
        )
        for name in ("ddp", "fsdp", "zero 1", "zero 2", "zero 2, offload", "gemini", "hybrid")
    ),
    case_of(
        "fp8",
        [Case(name, train_in_8_bits, under(name), only_on="cuda") for name in ("ddp", "fsdp", "zero 2", "gemini")],
    ),
]
