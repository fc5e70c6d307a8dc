"""`CheckpointIO.open_model`: a model's files are looked at first, and read in parts afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_checkpoint import CheckpointEngine
from booster_core import Booster
from booster_core.checkpoint_io import CheckpointIO
from booster_core.errors import CheckpointError, ConfigError
from booster_core.state import TensorShard


class WithExtraState(nn.Linear):
    """Has state that is no tensor of its own."""

    def get_extra_state(self):
        return {"steps": 3, "table": torch.arange(4)}

    def set_extra_state(self, state):
        self.state = state


@pytest.fixture
def model():
    torch.manual_seed(0)
    return WithExtraState(6, 4)


@pytest.fixture
def path(model, tmp_path):
    Booster().save_model(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def shard_of(weight, box, flat=None, dtype=torch.float32):
    shape = tuple(stop - start for start, stop in box) if flat is None else (flat[1] - flat[0],)
    data = torch.zeros(shape, dtype=dtype)
    return TensorShard(name="any", global_shape=tuple(weight.shape), dtype=dtype, box=box, flat=flat, data=data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_read_in_the_shards_own_type(dtype, model, path):
    files = CheckpointEngine.open_model(path, model)
    assert {name: meta.shape for name, meta in files.tensors.items() if name in model.state_dict()} == {
        "weight": (4, 6),
        "bias": (4,),
    }
    box = shard_of(model.weight, ((1, 3), (2, 6)), dtype=dtype)
    flat = shard_of(model.weight, ((0, 4), (1, 5)), flat=(3, 14), dtype=dtype)
    for _ in range(2):  # opened again as often as one likes
        with files:
            files.read("weight", box)
            files.read("weight", flat)
    assert torch.equal(box.data, model.weight.detach()[1:3, 2:6].to(dtype))
    assert torch.equal(flat.data, model.weight.detach()[:, 1:5].flatten()[3:14].to(dtype))


def test_extra_state_is_decoded(model, path):
    with CheckpointEngine.open_model(str(path), model) as files:
        (state,) = files.extra_values(["_extra_state", "absent"]).values()
        assert torch.equal(files.read_whole("bias"), model.bias)
    assert state["steps"] == 3
    assert torch.equal(state["table"], torch.arange(4))


def test_files_that_changed_or_are_gone_raise(model, path):
    files = CheckpointEngine.open_model(path, model)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"), files:
        pass
    Booster().save_model(nn.Linear(6, 5), path)
    with pytest.raises(CheckpointError, match=r"was changed: '\S+' was \(.*, and is (missing|\(5, 6\))"), files:
        pass
    Booster().save_model(model, path)
    with files:
        assert torch.equal(files.read_whole("bias"), model.bias)


def test_an_engine_without_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"`CheckpointIO` can't read models in parts; it has no `open_model`"):
        CheckpointIO.open_model(tmp_path)
