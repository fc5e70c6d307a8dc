"""How fast plugins train with one rank, which has nothing to send: against a plain loop, and other FSDPs against it.

The same for one rank of eight, whose others are not there, against ``fully_shard``: what sharding costs a rank itself.

Every contender trains the same model in pure bf16 by the same optimizer, so that all do the same arithmetic, but for
the cases about fp32 masters.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from device_runs.cases import Case, Figure
from torch import nn

from device_speed.language_models import (
    ATTENTION,
    CONTENDERS,
    FULLY_SHARD,
    TRANSFORMERS,
    boost,
    count_flops,
    make_batch,
    make_llama,
    make_optimizer,
    make_plugin,
    make_step,
    peak_flops,
    size_of,
)
from device_speed.measuring import Clock, Peak, Results, device_work, forget, in_turns, synchronize, turn
from device_speed.one_of_many import one_of_many

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_runs.cases import Setting
    from torch import Tensor

    from device_speed.language_models import Size

PLAIN = "the plain loop"
BAR = 1.02
"""The most that a step of a plugin with one rank may take of the plain loop's, where the device is the limit."""
_WARM = 6
"""In the first steps ranks compare what they do, and the host waits for that."""
_HOST_TOKENS = 8
_LEAK_BYTES = 1 << 20


def rates(setting: Setting) -> Sequence[Figure]:
    """Measure what the card and its link can do, for judging the other figures."""
    num_bytes = 1 << (30 if setting.is_real else 16)
    device = [torch.empty(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2)]
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pinned = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
    copies: dict[str, Callable[[], Any]] = {
        "device to pinned host": partial(pinned.copy_, device[0], non_blocking=True),
        "pinned host to device": partial(device[0].copy_, pinned, non_blocking=True),
        "device to pageable host": partial(pageable.copy_, device[0]),
        "pageable host to device": partial(device[0].copy_, pageable),
        "device to itself": partial(device[1].copy_, device[0]),
    }
    for copy in copies.values():
        copy()
    figures = []
    for name, times in in_turns(setting, copies, 2.0, steps=1, ahead=0).items():
        figures.append(
            Figure(f"copy of {num_bytes >> 20} MiB, {name}", [num_bytes / each for each in times], unit="B/s")
        )
    side = 8192 if setting.is_real else 32
    left, right = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    products = in_turns(setting, {"": partial(torch.mm, left, right, out=out)}, 1.0, steps=8)[""]
    what = f"TFLOP/s of a product of bf16 matrices, {side} x {side}"
    return [*figures, Figure(what, [2 * side**3 / each / 1e12 for each in products], unit="")]


def one_rank(
    setting: Setting,
    *,
    size: str,
    contenders: Sequence[str],
    bar: float | None,
    seconds: float,
    each: float,
    yardstick: str = PLAIN,
) -> Sequence[Figure]:
    """Measure each contender against a yardstick: steps in turns, memory, kernels, and the host's own time.

    Only the yardstick and one contender are there at a time.

    Args:
        setting: The device.
        size: Of the model.
        contenders: Names, the most important first.
        bar: For a step of ours.
        seconds: Of all of it; what has not begun by then is left out.
        each: Seconds of the rounds of each contender.
        yardstick: The plain loop, or as for `make_step`.
    """
    results = Results(Clock(setting, seconds))
    measured = size_of(setting, size)
    label = f"Llama {size}, bf16, {measured.samples} x {measured.length} tokens"
    if setting.world_size > 1:
        label += f", one rank of {setting.world_size}"
    other = _Contender(setting, "plain" if yardstick == PLAIN else yardstick, measured)
    results.figures += other.alone(f"{yardstick}, {label}", in_turns(setting, {"": other.step}, each / 4)[""])
    for name, attempt in results.attempts(contenders):
        memory = Peak(setting)
        with attempt:
            results.figures += _against(setting, name, measured, yardstick, other, f"{name}, {label}", bar, each)
        left_bytes = memory.remaining
        if left_bytes > _LEAK_BYTES:
            results.figures.append(Figure(f"memory that {name} leaves behind, {label}", [left_bytes], unit="B"))
    return results.end()


def one_of_eight(setting: Setting, **options: Any) -> Sequence[Figure]:
    """Measure what `one_rank` does, for a rank of eight whose others are not there, against ``fully_shard``."""
    with one_of_many(setting, 8) as ranked:
        return one_rank(ranked, yardstick=FULLY_SHARD, bar=None, **options)


def _against(
    setting: Setting,
    name: str,
    size: Size,
    yardstick: str,
    other: _Contender,
    what: str,
    bar: float | None,
    seconds: float,
) -> list[Figure]:
    ours = _Contender(setting, name, size)
    times = in_turns(setting, {"ours": ours.step, "other": other.step}, seconds)
    host = in_turns(setting, {"ours": ours.short_step, "other": other.short_step}, seconds / 8)
    host_time = f"step with {_HOST_TOKENS} tokens, the host's time, of {what}"
    return [
        Figure(f"step of {what}", times["ours"], yardstick, times["other"], bar=bar if name in CONTENDERS else None),
        Figure(f"peak memory of {what}", [ours.peak], yardstick, [other.peak], "B"),
        Figure(f"peak memory of a later step of {what}", [ours.later_peak], yardstick, [other.later_peak], "B"),
        Figure(f"memory reserved in a later step of {what}", [ours.reserved], yardstick, [other.reserved], "B"),
        Figure(host_time, host["ours"], yardstick, host["other"]),
        *ours.alone(what, times["ours"]),
    ]


class _Contender:
    """A model that trains under a strategy.

    Args:
        setting: The device.
        name: As for `make_step`.
        size: Of its model.

    Attributes:
        peak: Most bytes of device memory since before the model was made, in the first steps.
        later_peak: The same in a step after these.
        reserved: Most bytes that torch's allocator holds in that step, which begins with none that are free.
        work: What a step does on the device.
    """

    def __init__(self, setting: Setting, name: str, size: Size) -> None:
        memory = Peak(setting)
        model = make_llama(setting, size)
        self._tokens, self._flops = size.tokens, count_flops(model, size)
        self._setting = setting
        train = make_step(setting, name, model)
        self.step = partial(train, make_batch(setting, size))
        self.short_step = partial(train, make_batch(setting, size, 1, _HOST_TOKENS))
        for _ in range(_WARM):
            self.step()
        synchronize(setting)
        self.peak = memory.num_bytes
        memory.restart()
        self.step()
        synchronize(setting)
        self.later_peak, self.reserved = memory.num_bytes, memory.reserved_bytes
        self.work = device_work(setting, self.step)
        self.short_step()

    def alone(self, what: str, times: Sequence[float]) -> list[Figure]:
        """Return the figures that are not compared with anything."""
        figures = [Figure(f"speed of {what}", [self._tokens / each for each in times], unit="tokens/s")]
        figures += _utilization(self._setting, self._flops, what, times)
        if self.work is not None:
            figures += [
                Figure(f"kernels and copies of a step of {what}", [self.work.kernels], unit=""),
                Figure(f"their time, added up, of {what}", [self.work.seconds]),
                Figure(f"waits of the host for the device in a step of {what}", [self.work.waits], unit=""),
            ]
        return figures


def _utilization(setting: Setting, flops: float, what: str, times: Sequence[float]) -> list[Figure]:
    peak = peak_flops() if setting.is_real else None
    if not peak:
        return []
    mfu = [flops / each / peak for each in times]
    return [Figure(f"model FLOPs utilization of {what}, of {peak / 1e12:.0f} TFLOP/s", mfu, unit="")]


class _Sums(nn.Module):
    """Many parameters, and a sum of them all in one operation, so that the device has next to nothing to do."""

    def __init__(self, number: int, numel: int) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar."""
        return (torch.cat([*self.each]) * x).sum()


def many_parameters(setting: Setting, *, contenders: Sequence[str], seconds: float, each: float) -> Sequence[Figure]:
    """Measure what a step costs the host where a model has very many parameters."""
    results = Results(Clock(setting, seconds))
    number, numel = (10_000 if setting.is_real else 100), 16
    x = torch.ones(number * numel, device=setting.device)

    def make(name: str) -> Callable[[], None]:
        with torch.device(setting.device):
            model: Any = _Sums(number, numel)
        optimizer: Any = make_optimizer(model)
        backward: Callable[[Tensor], None] = torch.Tensor.backward
        if name in CONTENDERS:
            from booster_core import Booster

            booster = Booster(setting.device, "fp32", make_plugin(name))
            model, optimizer, *_ = booster.boost(model, optimizer)
            wrapped = optimizer

            def backward(loss: Tensor) -> None:
                booster.backward(loss, wrapped)

        elif name == FULLY_SHARD:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
            optimizer = make_optimizer(model)

        def step() -> None:
            backward(model(x))
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(_WARM):
            step()
        return step

    plain = make("plain")
    for name, attempt in results.attempts(contenders):
        with attempt:
            times = in_turns(setting, {"ours": make(name), "plain": plain}, each, steps=1, ahead=0)
            what = f"step of {name}, {number} parameters of {numel} elements"
            results.figures.append(Figure(what, times["ours"], PLAIN, times["plain"]))
        forget(setting)
    return results.end()


def compiled(
    setting: Setting, *, contenders: Sequence[str], seconds: float, each: float, size: str = "110M"
) -> Sequence[Figure]:
    """Measure a step with compiled layers against the same without, and how long compiling takes."""
    results = Results(Clock(setting, seconds))
    for name, attempt in results.attempts(contenders):
        with attempt:
            results.figures += _with_compiled_layers(setting, name, each, size)
        torch.compiler.reset()
        forget(setting)
    return results.end()


def _with_compiled_layers(setting: Setting, name: str, seconds: float, size_name: str) -> list[Figure]:
    size = size_of(setting, size_name)
    batch = make_batch(setting, size)
    # The simulated accelerator has no fused attention for the compiler, and nothing that Inductor could write code for.
    backend, attention = ("inductor", ATTENTION) if setting.is_real else ("eager", "eager")
    steps, first = {}, {}
    for way in ("eager", "compiled"):
        model = make_llama(setting, size, attention=attention)
        flops = count_flops(model, size)
        if way == "compiled":
            for layer in model.model.layers:
                layer.compile(backend=backend)
        steps[way] = partial(make_step(setting, name, model), batch)
        first[way] = turn(setting, steps[way], 1, ahead=0)
        for _ in range(_WARM):
            steps[way]()
    times = in_turns(setting, steps, seconds)
    what = f"{name} with compiled layers, Llama {size_name}, bf16"
    return [
        *_utilization(setting, flops, what, times["compiled"]),
        Figure(f"step of {what}", times["compiled"], "the same without", times["eager"]),
        Figure(f"first step, which compiles what no contender before has, of {what}", [first["compiled"]]),
    ]


def with_masters(
    setting: Setting, *, contenders: Sequence[tuple[str, str]], seconds: float, each: float
) -> Sequence[Figure]:
    """Measure plugins under a mixed precision, their default formats, against autocast over fp32 parameters by hand.

    Args:
        setting: The device.
        contenders: Pairs of a precision and a plugin; those of one precision follow each other.
        seconds: Of all of it.
        each: Seconds of the rounds of each contender.
    """
    results = Results(Clock(setting, seconds))
    size = size_of(setting, "500M")
    batch = make_batch(setting, size)
    known: dict[str, tuple[Callable[[], Any], int]] = {}

    def warmed(make: Callable[[], Callable[[dict[str, Tensor]], Tensor]]) -> tuple[Callable[[], Any], int]:
        memory = Peak(setting)
        step = partial(make(), batch)
        for _ in range(_WARM):
            step()
        synchronize(setting)
        return step, memory.num_bytes

    def against(precision: str, name: str) -> list[Figure]:
        if precision not in known:
            known.clear()
            known[precision] = warmed(partial(_autocast_step, setting, size, precision))
        by_hand, their_peak = known[precision]
        step, peak = warmed(partial(_mixed_step, setting, size, precision, name))
        times = in_turns(setting, {"ours": step, "by hand": by_hand}, each)
        yardstick, what = "autocast over fp32 parameters by hand", f"{name}, Llama 500M, {precision}"
        return [
            Figure(f"step of {what}", times["ours"], yardstick, times["by hand"]),
            Figure(f"peak memory of {what}", [peak], yardstick, [their_peak], "B"),
        ]

    for label, attempt in results.attempts([f"{precision}: {name}" for precision, name in contenders]):
        with attempt:
            precision, _, name = label.partition(": ")
            results.figures += against(precision, name)
        forget(setting)
    return results.end()


def _mixed_step(setting: Setting, size: Size, precision: str, name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    model = make_llama(setting, size, torch.float32)
    return boost(setting, make_plugin(name), precision, model, make_optimizer(model))


def _autocast_step(setting: Setting, size: Size, precision: str) -> Callable[[dict[str, Tensor]], Tensor]:
    model = make_llama(setting, size, torch.float32)
    optimizer = make_optimizer(model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler(setting.device, enabled=precision == "fp16" and setting.is_real)

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(setting.device, dtype):
            loss: Tensor = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


OURS = ("zero 1", "gemini", "fsdp", "ddp", "hybrid", "zero 2")
FIRST = [
    Case("speed: rates of copies and products", rates, seconds=40, is_timed=True),
    Case(
        "speed: one rank, Llama 1B",
        one_rank,
        {
            "size": "1B",
            "contenders": (*OURS, "ddp, gradient_as_bucket_view", FULLY_SHARD, TRANSFORMERS),
            "bar": BAR,
            "seconds": 90,
            "each": 3.0,
        },
        seconds=130,
        is_timed=True,
    ),
]
OF_EIGHT = [
    Case(
        f"speed: one rank of 8, Llama {size}",
        one_of_eight,
        {"size": size, "contenders": (*contenders, TRANSFORMERS), "seconds": 35, "each": 1.0},
        seconds=70,
        is_timed=True,
    )
    # DDP and hybrid keep all of 8B on each rank, which is more than most cards hold.
    for size, contenders in (("1B", OURS), ("8B", ("fsdp", "gemini", "zero 2", "zero 1")))
]
LATER = [
    Case(
        "speed: one rank, 10,000 parameters",
        many_parameters,
        {
            "contenders": ("zero 1", "gemini", "ddp", "hybrid", "zero 2", "fsdp", FULLY_SHARD),
            "seconds": 90,
            "each": 1.0,
        },
        seconds=150,
        is_timed=True,
    ),
    Case(
        "speed: one rank, Llama 110M",
        one_rank,
        {"size": "110M", "contenders": (*OURS, FULLY_SHARD, TRANSFORMERS), "bar": None, "seconds": 55, "each": 1.0},
        seconds=90,
        is_timed=True,
    ),
    Case(
        "speed: fp32 masters",
        with_masters,
        {
            "contenders": [
                *(("bf16", name) for name in OURS),
                *(("fp16", name) for name in ("zero 1", "gemini", "fsdp", "ddp")),
            ],
            "seconds": 60,
            "each": 1.0,
        },
        seconds=90,
        is_timed=True,
    ),
    Case(
        "speed: compiled layers",
        compiled,
        {"contenders": ("plain", "zero 1", "gemini", "fsdp"), "seconds": 30, "each": 1.0},
        seconds=100,
        is_timed=True,
    ),
    Case(
        "speed: compiled layers, Llama 1B",
        compiled,
        {"contenders": ("plain", *OURS), "seconds": 60, "each": 1.5, "size": "1B"},
        seconds=120,
        is_timed=True,
    ),
    Case(
        "speed: one rank, Llama 3B",
        one_rank,
        {
            "size": "3B",
            "contenders": ("zero 1", "gemini", "fsdp", FULLY_SHARD),
            "bar": None,
            "seconds": 50,
            "each": 2.5,
        },
        seconds=80,
        is_timed=True,
    ),
]
