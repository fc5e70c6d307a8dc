"""Pretrain a small byte-level Llama on the source code of Python's own standard library.

The same script runs in one process or several:

    python examples/pretrain_bytes.py
    torchrun --nproc-per-node 2 examples/pretrain_bytes.py --plugin ddp

It needs no network: the corpus is part of every Python installation, and is found through ``sysconfig``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch

VOCABULARY = 256  # one token per byte


class Windows(Dataset):
    """Non-overlapping windows of ``length`` consecutive bytes."""

    def __init__(self, text: bytes, length: int) -> None:
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(
            -1, length
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens}


def read_corpus(max_bytes: int) -> tuple[bytes, bytes]:
    """Return the training text, and the text of every tenth file, which is held out for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(files):
        (held_out if number % 10 == 9 else train).extend(path.read_bytes())
    return bytes(train[:max_bytes]), bytes(held_out[: max_bytes // 10])


def build_model(hidden: int, layers: int, length: int) -> LlamaForCausalLM:
    """Return a Llama with random weights over bytes."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate: a linear warmup, then a cosine decay to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a scalar over all ranks."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def memory_mib() -> float:
    """Return this process's memory use in MiB: on its GPU if it has one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * 4096 / 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", help="name of an installed plugin; 'ddp' on several ranks, else none")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="number format of forward and backward")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1024)
    parser.add_argument("--corpus-bytes", type=int, default=12_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain_bytes"), help="folder for the trained model")
    parser.add_argument("--losses", type=Path, help="write the loss of each step here, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch(seed=args.seed)
    plugin = args.plugin or ("ddp" if coordinator.world_size > 1 else None)
    booster = Booster(mixed_precision=args.precision, plugin=plugin)

    train_text, held_out_text = read_corpus(args.corpus_bytes)
    loader = booster.prepare_dataloader(
        Windows(train_text, args.length), args.batch_size, shuffle=True, seed=args.seed, drop_last=True
    )
    held_out = booster.prepare_dataloader(Windows(held_out_text, args.length), args.batch_size, drop_last=True)

    model = build_model(args.hidden, args.layers, args.length)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps, 20))

    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, lambda outputs: outputs.loss, loader, scheduler
    )
    booster.describe()
    coordinator.print_on_master(
        f"model      {num_parameters / 1e6:.1f} M parameters, {len(train_text) / 1e6:.1f} MB of text"
    )

    losses = train(booster, args, (model, optimizer, criterion, loader, scheduler), coordinator)
    validation = evaluate(model, held_out, booster.device)
    coordinator.print_on_master(f"validation loss {validation:.3f} nats per byte, on files that were held out")

    booster.save_model(model, str(args.out), shard=True)
    if coordinator.is_master():
        if args.losses:
            args.losses.write_text(json.dumps({"losses": losses, "validation": validation}))
        picture = args.out / "loss.png"
        figure = Figure()
        figure.subplots().plot(losses)
        figure.supxlabel("step")
        figure.supylabel("training loss, nats per byte")
        figure.savefig(picture)
        print(f"saved the model to {args.out}, and its loss curve to {picture}")
        print(f"the model continues 'def ':\n{sample(args.out)}")


def train(booster: Booster, args: argparse.Namespace, boosted: tuple, coordinator) -> list[float]:
    """Train for ``args.steps`` steps and return the loss of each, averaged over ranks."""
    model, optimizer, criterion, loader, scheduler = boosted
    losses: list[float] = []
    tokens_per_step = args.batch_size * args.length * coordinator.world_size
    progress = tqdm(total=args.steps, disable=not coordinator.is_master(), file=sys.stdout, mininterval=1.0)
    model.train()
    started = time.perf_counter()
    while len(losses) < args.steps:
        for batch in loader:
            outputs = model(**batch)
            loss = criterion(outputs)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
            rate = len(losses) * tokens_per_step / (time.perf_counter() - started)
            progress.set_postfix_str(
                f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s, {memory_mib():,.0f} MiB", refresh=False
            )
            progress.update()
            if len(losses) == args.steps:
                break
    progress.close()
    coordinator.print_on_master(
        f"loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f} (mean of the last 10 steps)"
    )
    return losses


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out, device: torch.device, max_batches: int = 20) -> float:
    """Return the mean loss over the first batches of the held-out windows, over all ranks."""
    model.eval()
    total, count = torch.zeros((), device=device), 0
    for batch in held_out:
        total += model(**{name: values.to(device) for name, values in batch.items()}).loss
        count += 1
        if count == max_batches:
            break
    model.train()
    return mean_over_ranks(total / count)


@torch.no_grad()
def sample(folder: Path, prompt: str = "def ", length: int = 120) -> str:
    """Load the folder by transformers, and return the model's continuation of a prompt."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    problems = {kind: keys for kind, keys in report.items() if keys}
    if problems:
        msg = f"transformers found the saved folder incomplete: {problems}"
        raise RuntimeError(msg)
    tokens = torch.tensor([list(prompt.encode())])
    generated = model.generate(tokens, max_new_tokens=length, do_sample=True, temperature=0.7, pad_token_id=0)
    return bytes(generated[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
