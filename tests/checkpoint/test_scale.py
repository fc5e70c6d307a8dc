"""How much a checkpoint of a TiB takes besides its values, and that the state of an optimizer keeps its precision."""

import pytest
import torch

from booster_checkpoint.files.checksums import Block, block_sizes
from booster_checkpoint.run.manifest import MANIFEST, FileEntry, Manifest
from booster_checkpoint.storage.location import LocalLocation
from booster_core import Booster

GIB = 1 << 30


@pytest.mark.parametrize("tensor_bytes", [1 << 20, 1 << 22, 1 << 26, 1 << 28])
def test_a_manifest_takes_five_megabytes_for_each_tebibyte(tensor_bytes, tmp_path):
    """1,024 files of a GiB, whatever the size of their tensors."""
    sizes = block_sizes([4096, *[tensor_bytes] * (GIB // tensor_bytes)])
    blocks = tuple(Block(size, f"{index:016x}") for index, size in enumerate(sizes))
    entry = FileEntry(nbytes=sum(sizes), blocks=blocks)
    files = {f"model/model-{number:05d}-of-01024.safetensors": entry for number in range(1, 1025)}
    Manifest(step=1, files=files).write(LocalLocation(tmp_path))
    assert (tmp_path / MANIFEST).stat().st_size <= 5_000_000


class Momentum(torch.optim.Optimizer):
    """Keeps its state in fp32, whatever the parameters are, as Adafactor of transformers does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            new = torch.zeros_like(parameter, dtype=torch.float32)
            momentum = self.state[parameter].setdefault("momentum", new)
            momentum.mul_(0.9).add_(parameter.grad.float())
            parameter.copy_(parameter.float() - 0.05 * momentum)


def bf16_run():
    torch.manual_seed(0)
    module = torch.nn.Linear(16, 16).bfloat16()
    booster, optimizer = Booster("cpu"), Momentum(module.parameters())
    model, boosted, *_ = booster.boost(module, optimizer)
    return booster, model, boosted, module, optimizer


def test_fp32_state_of_bf16_parameters_stays_fp32(tmp_path):
    booster, model, optimizer, module, own = bf16_run()
    for step in range(3):
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        booster.backward(model(inputs).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer)
    saved = [own.state[parameter]["momentum"] for parameter in module.parameters()]
    assert any(not torch.equal(values, values.bfloat16().float()) for values in saved), "bf16 can't hold them"
    booster, model, optimizer, module, own = bf16_run()
    booster.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    loaded = [own.state[parameter]["momentum"] for parameter in module.parameters()]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0, check_dtype=True)
