"""Train a ResNet-18 for images of 32 by 32 pixels, as those of CIFAR-10, and evaluate its accuracy.

python examples/resnet.py
torchrun --nproc-per-node 2 examples/resnet.py --plugin ddp
booster plan examples/resnet.py:build --loss loss --devices 8 --memory 80GiB --plugin ddp --plugin zero

Without a download, the images are drawn: ten shapes of any colour, size and place on a noisy ground. For CIFAR-10
itself, make `images` return ``torchvision.datasets.CIFAR10`` with its usual transforms.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch
from booster_runtime import gather_for_metrics

PIXELS = 32


def images(number: int, seed: int) -> TensorDataset:
    """Return images of ten classes, which differ by the shape that is drawn: regular outlines, full and empty."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=draw)
    corners, is_full = 3 + labels // 2, labels % 2 == 0
    place, size, turn = (torch.rand(number, *more, 1, 1, generator=draw) for more in ((2,), (), ()))
    axis = torch.linspace(-1, 1, PIXELS)
    x, y = axis - (place[:, 0] - 0.5) * 0.7, axis[:, None] - (place[:, 1] - 0.5) * 0.7
    step = 2 * math.pi / corners[:, None, None]
    angle = (torch.atan2(y, x) + turn * step) % step - step / 2
    # Of a regular outline, all points of the edge are equally far in this measure.
    distance = (x.square() + y.square()).sqrt() * angle.cos() / (step / 2).cos() / (0.45 + 0.2 * size)
    mask = (distance < 1) & (is_full[:, None, None] | (distance > 0.6))
    colours = torch.rand(2, number, 3, 1, 1, generator=draw)
    pixels = torch.where(mask[:, None], colours[0], colours[1])
    return TensorDataset(pixels + 0.1 * torch.randn(pixels.shape, generator=draw) - 0.5, labels)


class Block(nn.Module):
    """Two convolutions, added to their inputs."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else project

    def forward(self, pixels: Tensor) -> Tensor:
        return (self.body(pixels) + self.shortcut(pixels)).relu()


def resnet(width: int) -> nn.Sequential:
    """Return a ResNet-18 whose first layer keeps all pixels; its own ``width`` is 64."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(width, width, 1), Block(width, width, 1)]
    for inputs in (width, 2 * width, 4 * width):
        blocks += [Block(inputs, 2 * inputs, 2), Block(2 * inputs, 2 * inputs, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return SGD with weight decay on matrices and kernels, and without on norms and biases."""
    large = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    small = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": large, "weight_decay": 5e-4}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for, in full size."""
    model = resnet(64)
    return model, make_optimizer(model, 0.1)


def batch() -> tuple[Tensor, Tensor]:
    """Return the batch of all devices together."""
    return torch.zeros(1024, 3, PIXELS, PIXELS), torch.zeros(1024, dtype=torch.long)


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss that it plans with, called by ``--loss loss``."""
    return nn.functional.cross_entropy(outputs, batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer; 64 is ResNet-18")
    parser.add_argument("--images", type=int, default=4096, help="images to train on; a quarter more to evaluate")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    coordinator = launch_from_torch(seed=0)
    booster = Booster(plugin=args.plugin, mixed_precision=args.precision)
    model = resnet(args.width)
    optimizer = make_optimizer(model, args.lr)
    order = torch.Generator().manual_seed(0)
    loaders = [
        DataLoader(images(args.images, 0), args.batch_size, shuffle=True, generator=order, drop_last=True),
        DataLoader(images(args.images // 4, 1), args.batch_size),
    ]
    model, optimizer, criterion, (loader, test_loader), _ = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loaders
    )
    # A loader that `boost` returned is shorter, by the number of ranks.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))

    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        for pixels, labels in loader:
            loss = criterion(model(pixels), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        with torch.no_grad():
            for pixels, labels in test_loader:
                hit = model(pixels).argmax(dim=-1) == labels
                hits.append(gather_for_metrics(booster, hit, test_loader))  # each image once
        model.train()
        accuracy = torch.cat(hits).float().mean().item()
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        coordinator.print_on_master(
            f"epoch {epoch}, {seconds:.0f} s, {memory:.0f} MiB: loss {loss.item():.3f}, "
            f"accuracy {accuracy:.1%} of {sum(map(len, hits))} images"
        )
    booster.save_model(model, "resnet", shard=True)


if __name__ == "__main__":
    main()
