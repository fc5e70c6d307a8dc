"""Distil a language model into a smaller one: two models, each under a plugin of its own.

torchrun --nproc-per-node 2 examples/distillation.py --plugin zero --teacher-plugin fsdp

The teacher is frozen: its plugin decides only whether each rank holds all of it. Without ``--teacher`` it is a small
Llama over bytes with random weights, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch


def llama(num_layers: int) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=num_layers, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="of the student; none on one device")
    parser.add_argument("--teacher-plugin", help="of the teacher; none on one device")
    parser.add_argument("--teacher", help="folder of a pretrained model over bytes")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()
    launch_from_torch(seed=0)
    teacher = llama(4) if args.teacher is None else AutoModelForCausalLM.from_pretrained(args.teacher)
    student = llama(1)
    tokens = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)

    teacher, *_ = Booster(plugin=args.teacher_plugin).boost(teacher.eval().requires_grad_(False))  # noqa: FBT003
    booster = Booster(plugin=args.plugin)
    student, optimizer, _, loader, _ = booster.boost(
        student, torch.optim.AdamW(student.parameters(), lr=3e-3), dataloader=DataLoader(samples, args.batch_size)
    )
    losses = []
    for ids, _ in zip(loader, range(args.steps), strict=False):
        with torch.no_grad():
            target = log_softmax(teacher(input_ids=ids).logits / args.temperature, dim=-1)
        guess = log_softmax(student(input_ids=ids).logits / args.temperature, dim=-1)
        # A mean over tokens; the square keeps gradients as large at any temperature (Hinton et al. 2015).
        loss = kl_div(guess.flatten(0, 1), target.flatten(0, 1), reduction="batchmean", log_target=True)
        loss = loss * args.temperature**2
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    student.save_pretrained("student")
    booster.context.coordinator.print_on_master(f"divergence from the teacher {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
