"""Teach a small vision-language model to name the brightest quarter of an image.

torchrun --nproc-per-node 2 examples/vision_language.py --plugin fsdp

The model is a SmolVLM of a few layers with random weights, and images are made as they are needed, so that nothing has
to be downloaded; ``--model`` names a folder of a trained one, whose processor makes such batches of real images. Under
FSDP each rank's batch needs an image: others run other layers.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForImageTextToText, SmolVLMConfig

from booster_core import Booster, launch_from_torch

SIDE, PATCH, IMAGE_TOKENS = 16, 4, 4
IMAGE, QUESTION, FIRST_ANSWER, VOCABULARY = 10, 11, 12, 16


class Quarters(Dataset):
    """Images of which one quarter is bright, each with a question and the quarter's number as its answer."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = 0.1 * torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(index))
        row, column = divmod(index % 4, 2)
        half = SIDE // 2
        pixels[..., row * half : (row + 1) * half, column * half : (column + 1) * half] += 1
        tokens = torch.tensor([IMAGE] * IMAGE_TOKENS + [QUESTION, FIRST_ANSWER + index % 4])
        labels = torch.full_like(tokens, -100)
        labels[-1] = tokens[-1]
        text = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        return {"pixel_values": pixels, **text}


def make_model() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SmolVLMConfig(
        vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH},
        text_config={**sizes, "model_type": "llama", "vocab_size": VOCABULARY, "pad_token_id": 0},
        scale_factor=2,  # patches of two by two become one token
        image_token_id=IMAGE,
        pad_token_id=0,
    )
    return AutoModelForImageTextToText.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="none on one device")
    parser.add_argument("--model", help="folder of a pretrained model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step")
    args = parser.parse_args()
    launch_from_torch(seed=0)
    model = make_model() if args.model is None else AutoModelForImageTextToText.from_pretrained(args.model)
    booster = Booster(plugin=args.plugin)
    model, optimizer, _, loader, _ = booster.boost(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        dataloader=DataLoader(Quarters(4096), args.batch_size, shuffle=True),
    )
    losses = []
    for batch, _ in zip(loader, range(args.steps), strict=False):
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    booster.save_model(model, "vision_language", shard=True)
    booster.context.coordinator.print_on_master(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
