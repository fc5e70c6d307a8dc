"""Formats: each plugin's losses are those of plain torch, and an overflow in fp16 skips one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from device_runs.cases import CannotRun
from device_runs.parts import Part, case_of
from device_runs.small import (
    STRATEGIES,
    Run,
    assert_same_bits,
    exact_sgd,
    make_decoder,
    repeat_bits,
    tokens_of,
    train_plainly,
    under,
)

if TYPE_CHECKING:
    from device_runs.cases import Setting

FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 8


def follow_plain_torch(setting: Setting, *, plugin: str, options: dict[str, Any], precision: str) -> None:
    """Train with clipping, and compare losses with autocast alone; in fp32 the parameters, too."""
    repeat_bits()
    expected, parameters = train_plainly(setting, steps=STEPS, autocast=FORMATS[precision], clip=1.0)
    run = Run(setting, plugin, options, precision)
    losses = run.train(STEPS, clip=1.0)
    relative = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-9}[precision]
    close = [abs(a - b) <= relative * abs(b) for a, b in zip(losses, expected, strict=True)]
    assert all(close), (losses, expected)
    assert losses[-1] < 0.95 * losses[0], losses
    if precision == "fp32":
        found = run.parameters()
        worst = max(float((found[name] - each).abs().max()) for name, each in parameters.items())
        # A step moves a parameter by at most 1e-2; an epsilon of 1e-2 keeps roundings of gradients small.
        assert worst < 1e-4, worst


def keep_fp32_bits(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """Without clipping and with an optimizer that rounds alike, parameters have the bits of plain torch's."""
    repeat_bits()
    torch.backends.cuda.matmul.allow_tf32 = False
    expected, parameters = train_plainly(setting, make_optimizer=exact_sgd)
    run = Run(setting, plugin, options, make_optimizer=exact_sgd)
    assert run.train() == expected
    found = run.parameters()
    assert_same_bits({name: found[name] for name in parameters}, parameters, "fp32")


def overflow(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """A loss whose scaled gradients overflow changes nothing but the scale; what follows is as if it had not been."""
    repeat_bits()
    run, other = (Run(setting, plugin, options, "fp16", make_optimizer=exact_sgd) for _ in range(2))
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
    losses = [float(run.step(number)) for number in (3, 4)]
    expected = [float(other.step(number)) for number in (3, 4)]
    close = [abs(a - b) <= 2**-9 * abs(b) for a, b in zip(losses, expected, strict=True)]
    assert all(close), (losses, expected)


def train_in_8_bits(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
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

    def chosen(name: str) -> bool:
        return "layers" in name

    plain = make_decoder(setting).to(setting.device)
    convert_to_float8_training(plain, module_filter_fn=lambda _, name: chosen(name))
    optimizer = exact_sgd(plain.parameters())
    expected = []
    for number in range(STEPS):
        with torch.autocast(setting.device, torch.bfloat16):
            loss = plain(tokens_of(number, setting.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    model = make_decoder(setting)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: chosen(name))
    losses = Run(setting, plugin, options, "bf16", model=model, make_optimizer=exact_sgd).train(STEPS)
    close = [abs(a - b) <= 2**-5 * abs(b) for a, b in zip(losses, expected, strict=True)]
    assert all(close), (losses, expected)


CASES = [
    *(
        case_of(
            f"formats: {name}",
            [
                Part("bits of plain torch", keep_fp32_bits, under(name)),
                *(
                    Part(f"curve of plain torch, {each}", follow_plain_torch, under(name, precision=each))
                    for each in FORMATS
                ),
                Part("overflow in fp16", overflow, under(name)),
            ],
        )
        for name in STRATEGIES
        if name != "gemini, offload"
    ),
    case_of(
        "formats: gemini, offload",
        [
            Part(f"curve of plain torch, {each}", follow_plain_torch, under("gemini, offload", precision=each))
            for each in FORMATS
        ],
    ),
    case_of(
        "fp8",
        [Part(name, train_in_8_bits, under(name), only_on="cuda") for name in ("ddp", "fsdp", "zero 2", "gemini")],
    ),
]
