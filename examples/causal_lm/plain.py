"""Fine-tune a causal language model on a text, in plain PyTorch on one device; `finetune.py` is this on many.

python examples/causal_lm/plain.py --model FOLDER --train train.txt --validation validation.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a pretrained model and its tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--validation", type=Path, required=True, help="text to evaluate on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--run", type=Path, default=Path("run"), help="training state, from which a later run resumes")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the fine-tuned model")
    return parser.parse_args()


def read_samples(path: Path, tokenizer, length: int) -> list[dict[str, torch.Tensor]]:
    tokens = tokenizer(path.read_text(), return_tensors="pt").input_ids[0]
    samples = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": sample, "labels": sample} for sample in samples]


@torch.no_grad()
def perplexity(model, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    losses = []
    for batch in loader:
        labels = batch["labels"].to(device)
        logits = model(input_ids=batch["input_ids"].to(device)).logits
        loss = cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none").mean(dim=1)
        losses.append(loss)
    model.train()
    return torch.cat(losses).mean().exp().item()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
    order = torch.Generator().manual_seed(0)
    samples = read_samples(args.train, tokenizer, args.length)
    loader = DataLoader(samples, args.batch_size, shuffle=True, generator=order, drop_last=True)
    validation = DataLoader(read_samples(args.validation, tokenizer, args.length), args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    epoch = 0
    path = args.run / "state.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        epoch = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        order.set_state(state["order"])
    while epoch < args.epochs:
        for batch in loader:
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        epoch += 1
        print(f"epoch {epoch}: perplexity {perplexity(model, validation, device):.4f}")
        args.run.mkdir(parents=True, exist_ok=True)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epoch": epoch, "order": order.get_state()}, path)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
