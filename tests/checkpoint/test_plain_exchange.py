"""What core's engine for one process writes, booster-checkpoint's reads, and the other way round, bit for bit."""

import pytest
import torch
from torch import nn

from booster_checkpoint import CheckpointEngine
from booster_core import Booster
from booster_core.plain_checkpoint_io import PlainCheckpointIO
from booster_core.state import NamedTensors, as_bytes
from booster_testing.models import TinyStateful

ENGINES = {"plain": PlainCheckpointIO, "files": CheckpointEngine}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class Many(TinyStateful):
    """Has buffers of every kind, a large, an empty and a tied parameter besides running statistics and extra state."""

    def __init__(self):
        super().__init__()
        for index, dtype in enumerate(DTYPES):
            self.register_buffer(f"kind{index}", (torch.randn(3, 5) * 10).to(dtype))
        self.large = nn.Parameter(torch.randn(700, 500))
        self.again = self.embedding
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("scalar", torch.tensor(2.5))

    def forward(self, tokens):
        return super().forward(tokens) + self.large.sum()


class Run:
    """A run that saves by one of the engines."""

    def __init__(self, engine, seed, steps):
        torch.manual_seed(seed)
        self.booster = Booster("cpu")
        self.booster.checkpoint_io = ENGINES[engine](self.booster.plugin, self.booster.context)
        self.own = Many()
        groups = [
            {"params": [each for name, each in self.own.named_parameters() if name != "large"], "lr": 0.1},
            {"params": [self.own.large], "weight_decay": 0.5, "betas": (0.8, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        self.model, self.optimizer, *_, self.scheduler = self.booster.boost(self.own, optimizer, lr_scheduler=scheduler)
        for _ in range(steps):
            self.booster.backward(self.model(torch.randint(16, (2, 6))).square().mean(), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def bits(self):
        """Return all tensors as bytes, and everything else."""
        optimizer = self.optimizer.state_dict()
        state = {
            position: {name: as_bits(value) for name, value in states.items()}
            for position, states in optimizer["state"].items()
        }
        tensors = {name: as_bits(tensor) for name, tensor in NamedTensors.of(self.own).tensors.items()}
        return tensors, state, optimizer["param_groups"], self.scheduler.state_dict(), self.own.counter.count


def as_bits(tensor):
    return tensor.dtype, tuple(tensor.shape), bytes(as_bytes(tensor.detach().contiguous()))


@pytest.mark.parametrize(("writer", "reader"), [("plain", "files"), ("files", "plain")])
@pytest.mark.parametrize("is_folder", [False, True])
def test_files_and_folders(writer, reader, is_folder, tmp_path):
    model, optimizer = tmp_path / "m" / "model.safetensors", tmp_path / "o" / "optimizer.safetensors"
    saved, loaded = Run(writer, 0, 2), Run(reader, 1, 1)
    saved.booster.save_model(saved.model, model)
    saved.booster.save_optimizer(saved.optimizer, optimizer)
    saved.booster.save_lr_scheduler(saved.scheduler, tmp_path / "s.json")
    assert loaded.bits() != saved.bits()
    assert loaded.booster.load_model(loaded.model, model.parent if is_folder else model).is_complete
    loaded.booster.load_optimizer(loaded.optimizer, optimizer.parent if is_folder else optimizer)
    loaded.booster.load_lr_scheduler(loaded.scheduler, tmp_path / "s.json")
    assert loaded.bits() == saved.bits()
