"""What a step costs the host: one rank of many, whose others are not there and whose collectives return at once.

Tensors are tiny, so that processor time is Python's and torch's own. Two figures for each contender: processor time of
a step, in turns with the others, and calls of Python and C functions in it, which no busy machine changes.

    python benchmarks/host_time.py --profile fsdp
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import os
import pstats
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _results import compare
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_zero import LowLevelZeroPlugin

sys.path.append(str(Path(__file__).parents[1] / "tests" / "shared"))

from device_runs.cases import Setting
from device_speed.one_of_many import one_of_many

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MODELS = ("200 parameters", "1000 parameters", "10000 parameters", "Llama of 32 layers")
RANKS = (8, 64, 1024)
PARTS = ("forward", "backward", "step", "zero_grad")
PLAIN, DDP, FULLY_SHARD, ZERO_OPTIMIZER = "plain", "DistributedDataParallel", "fully_shard", "ZeroRedundancyOptimizer"
BARS = {
    ("zero 1", PLAIN): 1.1,
    ("zero 1", DDP): None,
    ("zero 1", ZERO_OPTIMIZER): None,
    ("zero 1", "DeepSpeed"): None,
    ("zero 2", PLAIN): None,
    ("ddp", DDP): None,
    ("gemini", PLAIN): None,
    ("gemini, a chunk a layer", FULLY_SHARD): 0.35,
    ("fsdp", PLAIN): None,
    ("fsdp, a unit a layer", FULLY_SHARD): 0.9,
}
"""The most that a step of one contender may take of another's; ``fully_shard`` has a unit a layer, too."""
STEP_BAR, GROWTH_BAR = 1.3, 1.02
"""Of the FSDP plugin's ``optimizer.step`` to the plain loop's; of any plugin's calls to those on the fewest ranks."""
_WARMUP = 6
"""In the first steps ranks compare what they do."""
_WIDTH, _SEED = 16, 0


class Block(nn.Module):
    """A layer of four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the shape of its input."""
        out: torch.Tensor = self.norm(self.linear(x))
        return out


class Sample:
    """A tiny model, its layers' class, and its loss.

    Args:
        name: One of `MODELS`, or another number of parameters.
    """

    def __init__(self, name: str) -> None:
        torch.manual_seed(_SEED)
        if name.startswith("Llama"):
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                vocab_size=64,
                hidden_size=_WIDTH,
                intermediate_size=2 * _WIDTH,
                num_hidden_layers=int(name.split()[2]),
                num_attention_heads=2,
                num_key_value_heads=2,
                use_cache=False,
                tie_word_embeddings=False,
            )
            self.model: nn.Module = LlamaForCausalLM(config)
            self.layers = list(self.model.model.layers)
            ids = torch.arange(8).view(2, 4)
            self.loss_of: Callable[[Any], torch.Tensor] = lambda model: model(input_ids=ids, labels=ids).loss
        else:
            self.layers = [Block() for _ in range(int(name.partition(" ")[0]) // 4)]
            self.model = nn.Sequential(*self.layers)
            x = torch.randn(2, _WIDTH)
            self.loss_of = lambda model: model(x).square().mean()
        self.layer_class = type(self.layers[0]).__name__
        self.layer_bytes = sum(each.nbytes for each in self.layers[0].parameters())


class Contender:
    """A training step in its parts.

    Args:
        name: ``"plain"``, one of torch's or DeepSpeed's, or ours.
        sample: The name of its model.
    """

    def __init__(self, name: str, sample: str) -> None:
        made = Sample(sample)
        self.model: Any = made.model
        self.loss_of, self.backward_of = made.loss_of, torch.Tensor.backward
        settings: dict[str, Any] = {"lr": 1e-3, "foreach": True}
        if name in (DDP, ZERO_OPTIMIZER):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif name == FULLY_SHARD:
            for layer in made.layers:
                fully_shard(layer)
            fully_shard(self.model)
        parameters = self.model.parameters()
        if name == ZERO_OPTIMIZER:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns that it is deprecated

            settings |= {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
            self.optimizer: Any = ZeroRedundancyOptimizer(parameters, **settings)
        else:
            self.optimizer = torch.optim.AdamW(parameters, **settings)
        plugins: dict[str, Callable[[], Any]] = {
            "ddp": TorchDDPPlugin,
            "zero 1": lambda: LowLevelZeroPlugin(stage=1),
            "zero 2": lambda: LowLevelZeroPlugin(stage=2),
            "gemini": GeminiPlugin,
            "gemini, a chunk a layer": lambda: GeminiPlugin(min_chunk_bytes=made.layer_bytes),
            "fsdp": TorchFSDPPlugin,
            "fsdp, a unit a layer": lambda: TorchFSDPPlugin(unit_classes=(made.layer_class,)),
        }
        if name in plugins:
            booster = Booster("cpu", plugin=plugins[name]())
            self.model, self.optimizer, *_ = booster.boost(self.model, self.optimizer)
            optimizer = self.optimizer
            self.backward_of = lambda loss: booster.backward(loss, optimizer)
        elif name == "DeepSpeed":
            self._use_deepspeed()

    def _use_deepspeed(self) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")  # which it asks for
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        config["zero_allow_untested_optimizer"] = True
        self.model, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.backward_of, self.optimizer = self.model.backward, self.model

    def step(self, around: Callable[[str], Any] | None = None) -> None:
        """Take one step; ``around`` is told after each part."""
        loss = self.loss_of(self.model)
        around and around("forward")
        self.backward_of(loss)
        around and around("backward")
        self.optimizer.step()
        around and around("step")
        self.optimizer.zero_grad()
        around and around("zero_grad")


def seconds_of(contender: Contender) -> dict[str, float]:
    """Return the processor time of a step's parts."""
    found: dict[str, float] = {}
    last = time.process_time()

    def take(part: str) -> None:
        nonlocal last
        now = time.process_time()
        found[part], last = now - last, now

    contender.step(take)
    return found


def calls_of(contender: Contender) -> dict[str, float]:
    """Return the number of calls of Python and C functions in a step's parts."""
    found: dict[str, float] = {}
    profile = cProfile.Profile()

    def take(part: str) -> None:
        profile.disable()
        found[part] = sum(each.callcount for each in profile.getstats())
        profile.clear()
        profile.enable()

    profile.enable()
    contender.step(take)
    profile.disable()
    return found


def measure(
    sample: str, world_size: int, names: tuple[str, ...], rounds: int, profiled: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the times, round by round, and the calls of each contender that can run here, by part.

    Args:
        sample: The name of the model.
        world_size: Number of ranks.
        names: Of contenders.
        rounds: Number of steps of each whose time is taken; 0 counts calls alone.
        profiled: The contender whose functions that take longest are printed; empty for none.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    calls: dict[str, dict[str, float]] = {}
    with one_of_many(Setting("cpu", "", 0, 1, Path()), world_size):
        contenders = {name: Contender(name, sample) for name in names}
        for contender in contenders.values():
            for _ in range(_WARMUP):
                contender.step()
        gc.collect()
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                for part, taken in seconds_of(contenders[name]).items():
                    seconds.setdefault(name, {}).setdefault(part, []).append(taken)
        for name, contender in contenders.items():
            calls[name] = calls_of(contender)
            if name == profiled:
                profile = cProfile.Profile(time.process_time)
                profile.runcall(contender.step)
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return seconds, calls


def report(sample: str, world_size: int, seconds: Mapping[str, Any], calls: Mapping[str, Any]) -> bool:
    """Print the parts, and keep the ratios of a model on the fewest ranks; return whether all bars are met."""
    for name, parts in calls.items():
        shown = (f"{part} {1e3 * statistics.median(seconds[name][part]):.1f} ms {parts[part]:,.0f}" for part in PARTS)
        print(f"  {sample}, {world_size} ranks, {name}: {', '.join(shown)} calls", flush=True)
    is_met = True
    compared = [(name, other, PARTS, bar) for (name, other), bar in BARS.items()]
    compared += [("fsdp, a unit a layer", PLAIN, ("step",), STEP_BAR)]
    for name, other, parts, bar in compared:
        if name not in calls or other not in calls:
            continue
        of = "a step" if parts == PARTS else "optimizer.step"
        yardstick = "the plain loop" if other == PLAIN else other
        times = [
            [sum(each) for each in zip(*(seconds[who][part] for part in parts), strict=True)] for who in (name, other)
        ]
        counts = [[sum(calls[who][part] for part in parts)] for who in (name, other)]
        of = f"of {of}, {name}, one rank of {world_size}, {sample}"
        for kind, unit, (ours, theirs) in (("host time", "s", times), ("calls", "", counts)):
            is_met &= compare(f"{kind} {of}", ours, theirs, yardstick=yardstick, bar=bar, unit=unit)
    return is_met


def main() -> int:
    """Print the results; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"of {MODELS}, or other numbers")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--only", nargs="+", help="contenders")
    parser.add_argument("--profile", default="", help="a contender, on the fewest ranks")
    asked = parser.parse_args()
    names = tuple(dict.fromkeys(name for pair in BARS for name in reversed(pair)))
    names = tuple(name for name in names if name in (asked.only or names))
    if importlib.util.find_spec("deepspeed") is None:
        names = tuple(name for name in names if name != "DeepSpeed")
    warnings.filterwarnings("ignore", message=".*ZeroRedundancyOptimizer.*")
    is_met = True
    plugins = tuple(name for name in names if any(name == ours for ours, _ in BARS))
    fewest, *more = asked.ranks
    for sample in asked.models:
        seconds, few = measure(sample, fewest, names, asked.rounds, asked.profile)
        is_met &= report(sample, fewest, seconds, few)
        for world_size in more:
            _, many = measure(sample, world_size, plugins, 0, "")
            totals = {name: [sum(calls[name].values()) for calls in (many, few)] for name in plugins}
            most = max(totals, key=lambda name: totals[name][0] / totals[name][1])
            what = f"calls of a step, {most}, which grow most, one rank of {world_size}, {sample}"
            theirs = f"one rank of {fewest}"
            is_met &= compare(what, totals[most][:1], totals[most][1:], yardstick=theirs, bar=GROWTH_BAR, unit="")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
