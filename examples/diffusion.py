"""Train a small diffusion transformer, in the manner of DiT, on made images, with averaged weights.

torchrun --nproc-per-node 2 examples/diffusion.py --plugin zero

It tells the noise in an image of one bright square, by time and class. Models of diffusers train in the same way: give
`boost` the UNet or the transformer, and keep text encoder and VAE outside, frozen.
Reference: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers" (arXiv:2212.09748).
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch
from booster_runtime import ema

SIDE, PATCH, WIDTH, CLASSES = 8, 2, 64, 4


class Block(nn.TransformerEncoderLayer):
    """A block whose input is scaled and shifted by time and class."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        nn.init.zeros_(self.modulation.weight)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return super().forward(x * (1 + scale) + shift)


class DiT(nn.Module):
    """Predicts the noise in images of shape ``(batch, 3, SIDE, SIDE)``."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.times = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * PATCH**2))

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        angles = 1000 * time[:, None] * torch.logspace(0, -4, WIDTH // 2, device=time.device)
        condition = self.times(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.classes(label)
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return nn.functional.fold(self.head(x).transpose(1, 2), (SIDE, SIDE), PATCH, stride=PATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="none on one device")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    launch_from_torch(seed=0)
    labels = torch.arange(1024) % CLASSES
    images = torch.full((len(labels), 3, SIDE, SIDE), -1.0).view(-1, 3, 2, SIDE // 2, 2, SIDE // 2)
    images[torch.arange(len(labels)), :, labels // 2, :, labels % 2] = 1.0
    data = DataLoader(TensorDataset(images.view(-1, 3, SIDE, SIDE), labels), batch_size=32, shuffle=True)
    booster, model = Booster(plugin=args.plugin), DiT(num_layers=2)
    model, optimizer, _, data, _ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=2e-3), dataloader=data)
    average, losses = ema(booster, model, decay=0.95), []
    while len(losses) < args.steps:
        for image, label in data:
            time, noise = torch.rand(len(image), device=image.device), torch.randn_like(image)
            angle = time.view(-1, 1, 1, 1) * math.pi / 2  # of a cosine schedule
            loss = (model(angle.cos() * image + angle.sin() * noise, time, label) - noise).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            average.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    average.save("dit.safetensors")
    booster.context.coordinator.print_on_master(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
