"""Fine-tune on conversations: a chat template, loss on the answers alone, packed rows, weight-decay groups, warm-up.

torchrun --nproc-per-node 2 examples/supervised_finetuning.py --plugin zero
torchrun --nproc-per-node 8 examples/supervised_finetuning.py --plugin fsdp --precision bf16
    --model FOLDER --length 4096 --lr 1e-5
booster plan examples/supervised_finetuning.py:build --devices 8 --memory 80GiB --precision bf16

Without a folder, a tiny model learns to add. Conversations of your own are lists of messages, as below.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from booster_core import Booster, launch_from_torch
from booster_runtime import LazyInitContext, PackedDocuments, enable_linear_cross_entropy, train_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

END = "<end>"
# What the model is to say is between the marks of `generation`: only that gets labels.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pretrained folder, whose chat template has `generation`")
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, so that the example needs no download."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    marks = ["<unknown>", "<user>", "<assistant>", END]
    words = [*marks, *"0123456789+= "]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=marks[0]))
    tokenizer.pre_tokenizer = Split(Regex(r"<\w+>|."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token=END)


def make_model(args: argparse.Namespace, vocabulary: int) -> torch.nn.Module:
    if args.model is not None:
        with LazyInitContext():  # each rank reads its part of the files in `boost`
            return AutoModelForCausalLM.from_pretrained(args.model)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=args.length, **sizes))


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield sums to learn; replace them by your own."""
    for number in count():
        one, other = divmod(number * 1103 % 2500, 50)
        answer = {"role": "assistant", "content": str(one + other)}
        yield [{"role": "user", "content": f"{one}+{other}="}, answer]


class Documents:
    """Token ids of conversations, with labels for the answers alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for messages in conversations():
            encoded = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            tokens, masks = encoded["input_ids"], encoded["assistant_masks"]
            labels = [token if mask else -100 for token, mask in zip(tokens, masks, strict=True)]
            yield {"input_ids": tokens, "labels": labels}


def groups_of(model: torch.nn.Module, decay: float) -> list[dict]:
    """Return matrices with weight decay, and norms and biases without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for: Llama 3's sizes for 8 billion parameters."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, use_cache=False, **sizes)).train()
    enable_linear_cross_entropy(model)
    return model, torch.optim.AdamW(groups_of(model, 0.1), lr=1e-5, betas=(0.9, 0.95))


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of all devices together, packed."""
    tokens = torch.zeros(8, 4096, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(1024).repeat(4).expand(8, -1)}


def warm_up_and_cosine(step: int, steps: int, warm_up: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin, mixed_precision=args.precision)
    tokenizer = make_tokenizer() if args.model is None else AutoTokenizer.from_pretrained(args.model)
    model = make_model(args, len(tokenizer)).train()
    enable_linear_cross_entropy(model)
    loader = DataLoader(PackedDocuments(Documents(tokenizer), args.length), args.batch_size, drop_last=True)
    optimizer = torch.optim.AdamW(groups_of(model, 0.1), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_and_cosine(step, args.steps, max(args.steps // 10, 1))
    )
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)

    batches, start, losses = iter(loader), time.perf_counter(), []
    for _ in range(args.steps):
        # Ranks have different numbers of answers' tokens: each token counts the same.
        weight = lambda batch: (batch["labels"][:, 1:] != -100).sum()  # noqa: E731
        losses.append(train_batch(booster, batches, model, None, optimizer, max_norm=1.0, weight=weight).item())
        schedule.step()
    seconds = time.perf_counter() - start
    booster.save_model(model, "finetuned", shard=True)
    if coordinator.is_master():
        tokenizer.save_pretrained("finetuned")
    tokens = args.steps * args.batch_size * args.length * coordinator.world_size
    coordinator.print_on_master(f"{tokens / seconds:.1f} tokens per second; loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
