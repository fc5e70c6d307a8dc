"""Pretrain a Llama on a stream of documents, packed into rows: it is read shard by shard, and resumed where it stood.

python examples/pretrain_stream.py
torchrun --nproc-per-node 2 examples/pretrain_stream.py --plugin zero
torchrun --nproc-per-node 2 examples/pretrain_stream.py --plugin fsdp --resume
booster plan examples/pretrain_stream.py:build --devices 8 --memory 80GiB --precision bf16

The documents are the files of Python's own library, as bytes. A stream of ``datasets`` goes in their place as it is.
"""

from __future__ import annotations

import argparse
import math
import resource
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch
from booster_runtime import LazyInitContext, PackedDocuments, enable_linear_cross_entropy, train_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

END = 256  # after each document; bytes are the other tokens


class Files(IterableDataset):
    """Token ids of text files; what `shard` and `num_shards` are for ranks and workers to read files of their own."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    @property
    def num_shards(self) -> int:
        return len(self.paths)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.paths[index::num_shards])

    def __iter__(self) -> Iterator[list[int]]:
        for path in self.paths:
            yield [*path.read_bytes(), END]


def library(number: int) -> Files:
    """Return the largest files of Python's library, each a shard."""
    paths = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    return Files(sorted(paths, key=lambda path: (-path.stat().st_size, path.name))[:number])


def make_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices, and without on norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def warm_up_and_cosine(step: int, steps: int, warm_up: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return how many tokens of a batch count: the first one of a document does not."""
    return (batch["labels"][:, 1:] != -100).sum()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for: Llama 3's sizes for 8 billion parameters."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, use_cache=False, **sizes)).train()
    enable_linear_cross_entropy(model)
    return model, make_optimizer(model, 3e-4)


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of all devices together."""
    tokens = torch.zeros(8, 4096, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--files", type=int, default=64, help="shards of the stream")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank and step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="go on where the saved run stood in its stream")
    args = parser.parse_args()
    coordinator = launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin, mixed_precision=args.precision)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
    with LazyInitContext():  # each rank makes the values that it holds
        model = LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, num_attention_heads=4, **sizes)).train()
    enable_linear_cross_entropy(model)
    optimizer = make_optimizer(model, args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_and_cosine(step, args.steps, max(args.steps // 10, 1))
    )
    loader = DataLoader(PackedDocuments(library(args.files), args.length), args.batch_size, drop_last=True)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "dataloader": loader}
    first = booster.load_checkpoint("pretraining", **state).step if args.resume else 0

    batches, start, losses = iter(loader), time.perf_counter(), []
    for _ in range(first, args.steps):
        loss = train_batch(booster, batches, model, None, optimizer, max_norm=1.0, weight=num_labels)
        losses.append(loss.item())
        schedule.step()
    seconds = time.perf_counter() - start
    booster.save_checkpoint("pretraining", step=args.steps, **state)
    rows = len(losses) * args.batch_size * coordinator.world_size
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    coordinator.print_on_master(
        f"{rows * args.length / seconds:.1f} tokens per second, {memory:.1f} MiB; "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
