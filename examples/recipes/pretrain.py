"""Pretrain or go on with a language model of transformers; plugin and options are of a settings file.

booster run examples/recipes/pretrain.py --nproc 8 --settings examples/recipes/llama-8b-8-devices.toml \
    --model meta-llama/Llama-3.1-8B --text corpus.txt --length 4096 --samples 2

The model is built without memory, and each rank gets its own part of it. Texts are packed into samples of one length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from booster_core import Booster, launch_from_torch
from booster_runtime import LazyInitContext, enable_activation_checkpointing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hub id or folder")
    parser.add_argument("--text", required=True, type=Path, help="a text file")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=1, help="of each data parallel rank in a batch")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--from-scratch", action="store_true", help="draw the weights, and take bytes for tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    return parser.parse_args()


def samples_of(args: argparse.Namespace) -> torch.Tensor:
    """Return tokens of shape ``(samples, length)``."""
    if args.from_scratch:
        tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        tokens = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    return tokens[: len(tokens) // args.length * args.length].view(-1, args.length)


def main() -> None:
    args = arguments()
    coordinator = launch_from_torch(seed=0)
    booster = Booster()
    with LazyInitContext():
        if args.from_scratch:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model)
    enable_activation_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = DataLoader(samples_of(args), batch_size=args.samples, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, dataloader=loader, lr_scheduler=scheduler)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    step, losses = booster.load_checkpoint(args.out, resume=True, **state).step, []
    while step < args.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss.detach()))
            step += 1
            if step % 500 == 0 or step == args.steps:
                booster.save_checkpoint(args.out, step=step, **state)
            if step == args.steps:
                break
    coordinator.print_on_master(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after step {step}")


if __name__ == "__main__":
    main()
