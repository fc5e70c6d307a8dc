"""Pretrain a model whose state is larger than memory: Gemini keeps what is not in use on a disk.

torchrun --nproc-per-node 2 examples/gemini_from_disk.py --disk /scratch --budget-mib 2

``--budget-mib`` is what Gemini may use on each rank for parameters, gradients and optimizer state; activations come on
top. The model is built without values, which each rank then computes straight into its part of the chunks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch
from booster_gemini import GeminiPlugin
from booster_runtime import LazyInitContext

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder on a fast disk, not in memory")
    parser.add_argument("--budget-mib", type=int, default=2, help="memory of each rank for the model's state")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()
    coordinator = launch_from_torch(seed=0)
    plugin = GeminiPlugin(
        placement_policy="auto", memory_budget_bytes=args.budget_mib * MIB, offload_dir=args.disk, max_norm=1.0
    )
    booster = Booster(plugin=plugin)
    sizes = {"hidden_size": args.hidden_size, "intermediate_size": 2 * args.hidden_size, "num_attention_heads": 4}
    with LazyInitContext():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=args.layers, **sizes))
    state_mib = 16 * sum(map(torch.numel, model.parameters())) / coordinator.world_size / MIB  # fp32 with Adam
    tokens = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), None, DataLoader(samples, args.batch_size)
    )
    losses = []
    for ids, _ in zip(loader, range(args.steps), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    booster.save_checkpoint("run", step=args.steps, model=model, optimizer=optimizer, dataloader=loader)
    booster.context.coordinator.print_on_master(
        f"{state_mib:.1f} MiB of state in {args.budget_mib} MiB: loss {losses[0]:.4f} to {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
