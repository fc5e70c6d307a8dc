"""Run one training step of ResNet-18: the script of Colossal-AI's Booster tutorial, moved to Booster.

Changed are the imports, the launch, the device (`booster.device`, so that it needs no GPU), and the images, which each
rank draws for itself. It runs in one process or several:

    python examples/resnet18_booster_tutorial.py
    torchrun --nproc-per-node 2 examples/resnet18_booster_tutorial.py

It needs torchvision, but no data set: the images are random.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torchvision.models import resnet18

from booster_core import Booster, launch_from_torch
from booster_core.plugin import TorchDDPPlugin


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--out", type=Path, default=Path("model"), help="folder for the saved model")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch()
    booster = Booster(plugin=TorchDDPPlugin())

    model = resnet18()
    criterion = lambda x: x.mean()  # noqa: E731 - the tutorial's
    optimizer = SGD(model.parameters(), lr=0.001)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    model, optimizer, criterion, _, scheduler = booster.boost(model, optimizer, criterion, lr_scheduler=scheduler)

    # The launch gave all ranks the same seed; each draws its own images.
    generator = torch.Generator().manual_seed(coordinator.rank)
    images = torch.randn(4, 3, args.image_size, args.image_size, generator=generator).to(booster.device)
    loss = criterion(model(images))
    booster.backward(loss, optimizer)
    norm = optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    scheduler.step()
    coordinator.print_on_master(
        f"loss {float(loss):.6f}, gradient norm {float(norm):.6f}, next learning rate {scheduler.get_last_lr()[0]:g}"
    )

    # In files of at most 10 MiB, with an index.
    booster.save_model(model, str(args.out), True, True, "", 10, use_safetensors=True)  # noqa: FBT003 - the tutorial's

    new_model = resnet18()
    booster.load_model(new_model, str(args.out))
    if coordinator.is_master():
        # Under DDP, BatchNorm's running statistics are those of rank 0, which each forward broadcasts.
        trained = {name: value.cpu() for name, value in model.unwrap().state_dict().items()}
        loaded = new_model.state_dict()
        wrong = [name for name in trained if not torch.equal(trained[name], loaded[name])]
        if wrong or trained.keys() != loaded.keys():
            msg = f"The saved model differs from the trained one in {wrong or trained.keys() ^ loaded.keys()}."
            raise RuntimeError(msg)
        print(f"{len(trained)} tensors saved to {args.out} and loaded again")


if __name__ == "__main__":
    main()
