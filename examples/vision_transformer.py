"""Train a vision transformer on scikit-learn's handwritten digits, and evaluate it.

python examples/vision_transformer.py
torchrun --nproc-per-node 2 examples/vision_transformer.py --plugin ddp

The digits are part of scikit-learn (``pip install scikit-learn``): 1,797 images of 8 by 8 pixels.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split
from transformers import ViTConfig, ViTForImageClassification

from booster_core import Booster, launch_from_torch
from booster_runtime import gather_for_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    args = parser.parse_args()
    launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.Generator().manual_seed(0)
    train, test = random_split(TensorDataset(images, labels), [0.8, 0.2], generator=order)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loaders = [DataLoader(train, args.batch_size, shuffle=True, generator=order), DataLoader(test, args.batch_size)]
    num_steps = args.epochs * len(loaders[0])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    model, optimizer, _, (loader, test_loader), scheduler = booster.boost(model, optimizer, None, loaders, scheduler)

    for epoch in range(1, args.epochs + 1):
        for pixels, target in loader:
            loss = model(pixel_values=pixels, labels=target).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        with torch.no_grad():
            for pixels, target in test_loader:
                hit = model(pixel_values=pixels).logits.argmax(dim=-1) == target
                hits.append(gather_for_metrics(booster, hit, test_loader))  # each image once
        model.train()
        accuracy = torch.cat(hits).float().mean().item()
        booster.context.coordinator.print_on_master(f"epoch {epoch}: {accuracy:.1%} of {sum(map(len, hits))} images")
    model.save_pretrained("digits")


if __name__ == "__main__":
    main()
