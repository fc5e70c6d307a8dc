"""Train a mixture of experts whose experts are spread over ranks.

torchrun --nproc-per-node 2 examples/mixture_of_experts.py --ep-size 2
booster plan examples/mixture_of_experts.py:build --devices 8 --memory 80GiB --plugin hybrid --option ep_size=8

Each rank holds ``1/ep_size`` of the experts of each layer, and ranks send each other the tokens that choose them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from booster_core import Booster, launch_from_torch
from booster_hybrid import HybridParallelPlugin
from booster_runtime import train_batch


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for: OLMoE's sizes for 7 billion parameters, of which a token uses 1."""
    sizes = {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    experts = {"num_local_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 16}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50304, output_router_logits=True, **sizes, **experts)).train()
    return model, torch.optim.AdamW(model.parameters(), lr=4e-4)


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of all devices together."""
    tokens = torch.zeros(8, 4096, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()
    launch_from_torch(seed=0)
    booster = Booster(plugin=HybridParallelPlugin(ep_size=args.ep_size, zero_stage=args.zero_stage))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    # Without the loss over the router's choices, training would come to use a few experts only.
    config = MixtralConfig(vocab_size=256, output_router_logits=True, router_aux_loss_coef=0.02, **sizes, **experts)
    model = MixtralForCausalLM(config)
    tokens = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), dataloader=DataLoader(samples, args.batch_size)
    )
    batches = ({"input_ids": batch, "labels": batch} for batch in loader)  # the model's keyword arguments
    losses = [train_batch(booster, batches, model, None, optimizer, max_norm=1.0).item() for _ in range(args.steps)]
    model.save_pretrained("experts")  # whole experts, whatever `--ep-size` was
    booster.context.coordinator.print_on_master(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
