"""Fine-tune a causal language model on a text, on any number of devices, with evaluation and resume.

torchrun --nproc-per-node 2 examples/causal_lm/finetune.py --plugin fsdp --model FOLDER --train train.txt
    --validation validation.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from booster_core import Booster, launch_from_torch
from booster_runtime import gather_for_metrics


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a pretrained model and its tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--validation", type=Path, required=True, help="text to evaluate on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--run", type=Path, default=Path("run"), help="training state, from which a later run resumes")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the fine-tuned model")
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    formats = ["fp32", "bf16", "fp16", "pure-bf16"]
    parser.add_argument("--precision", choices=formats, help="number format; that of the model, with updates in fp32")
    return parser.parse_args()


def read_samples(path: Path, tokenizer, length: int) -> list[dict[str, torch.Tensor]]:
    tokens = tokenizer(path.read_text(), return_tensors="pt").input_ids[0]
    samples = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": sample, "labels": sample} for sample in samples]


@torch.no_grad()
def perplexity(model, loader: DataLoader, booster: Booster) -> float:
    model.eval()
    losses = []
    for batch in loader:
        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"]).logits
        loss = cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none").mean(dim=1)
        losses.append(gather_for_metrics(booster, loss, loader))  # each sample once, on every rank
    model.train()
    return torch.cat(losses).mean().exp().item()


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin, mixed_precision=args.precision)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    order = torch.Generator().manual_seed(0)
    samples = read_samples(args.train, tokenizer, args.length)
    loader = DataLoader(samples, args.batch_size, shuffle=True, generator=order, drop_last=True)
    validation = booster.prepare_dataloader(read_samples(args.validation, tokenizer, args.length), args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    epoch = 0
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    if booster.has_checkpoint(args.run):
        epoch = booster.load_checkpoint(args.run, **state).step
    while epoch < args.epochs:
        for batch in loader:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        epoch += 1
        coordinator.print_on_master(f"epoch {epoch}: perplexity {perplexity(model, validation, booster):.4f}")
        booster.save_checkpoint(args.run, step=epoch, **state, keep_last=2)
    model.save_pretrained(args.out)
    if coordinator.is_master():
        tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
