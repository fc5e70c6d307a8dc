"""Train a generative adversarial network: two models with an optimizer each, boosted by one Booster.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py --plugin zero

The data are points around a circle. Each sample comes with its noise, so that any number of ranks computes the same.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch
from booster_runtime import to_device

NOISE = 8


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, outputs))


def circle(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    points = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2, generator=generator)
    return TensorDataset(points, torch.randn(count, NOISE, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    args = parser.parse_args()
    launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin)
    data = circle(1024)
    generator, critic = mlp(NOISE, 2), mlp(2, 1)
    # One `boost` for each model; the loader goes with the first.
    generator, generator_optimizer, _, loader, _ = booster.boost(
        generator, torch.optim.AdamW(generator.parameters(), lr=1e-3), dataloader=DataLoader(data, args.batch_size)
    )
    critic, critic_optimizer, *_ = booster.boost(critic, torch.optim.AdamW(critic.parameters(), lr=2e-3))

    for _ in range(args.epochs):
        for real, noise in loader:
            with torch.no_grad():
                fake = generator(noise)
            # One forward over both, so that plugins see one forward for each backward.
            score_real, score_fake = critic(torch.cat([real, fake])).chunk(2)
            critic_loss = softplus(-score_real).mean() + softplus(score_fake).mean()
            booster.backward(critic_loss, critic_optimizer)
            critic_optimizer.step()
            critic_optimizer.zero_grad()

            generator_loss = softplus(-critic(generator(noise))).mean()
            booster.backward(generator_loss, generator_optimizer)
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic_optimizer.zero_grad()  # the generator's loss has run backward through the critic too
    with torch.no_grad():
        radius = generator(to_device(booster, data.tensors[1])).norm(dim=1)
    booster.save_model(generator, "generator.safetensors")
    booster.context.coordinator.print_on_master(
        f"generated points have radius {radius.mean():.4f} +- {radius.std():.4f}"
    )


if __name__ == "__main__":
    main()
