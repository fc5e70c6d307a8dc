"""Train on sequences too long for one device: each rank computes a part of every sequence.

torchrun --nproc-per-node 2 examples/long_context.py --sp-size 2 --length 4096

Batches are whole and the same on the ranks of a sequence; the plugin splits hidden states between them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for: Llama 3's sizes for 8 billion parameters."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=1 << 17, **sizes)
    model = LlamaForCausalLM(config).train()
    enable_activation_checkpointing(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of all devices together."""
    tokens = torch.zeros(1, 1 << 17, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sp-size", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--mode", default="ring_attn", choices=["ring_attn", "all_to_all"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    launch_from_torch(seed=0)
    mode = args.mode if args.sp_size > 1 else None
    booster = Booster(plugin=HybridParallelPlugin(sp_size=args.sp_size, sequence_parallelism_mode=mode, zero_stage=1))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=args.length, **sizes))
    enable_activation_checkpointing(model)  # of each layer only its input stays in memory
    tokens = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), dataloader=DataLoader(samples, batch_size=1)
    )
    losses = []
    for ids, _ in zip(loader, range(args.steps), strict=False):
        loss = model(input_ids=ids, labels=ids).loss  # of the whole sequence, the same on its ranks
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    booster.context.coordinator.print_on_master(
        f"sequences of {args.length} tokens: loss {losses[0]:.4f} to {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
