"""Digests of frozen parameters: of values and places, however ranks hold them, and in whichever format."""

import pytest
import torch
from synthetic_state import parts_of
from torch import nn

from booster_checkpoint.run.frozen import check_frozen, frozen_part
from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_core.state import ModelView, Replica, ReplicatedStateAdapter, TensorShard, slices_of


class Cut(ModelView):
    """Shows tensors as the shards of four ranks, all of which are here: boxes of columns, each in two flat ranges."""

    def model_shards(self):
        for shard in self.inner.model_shards():
            about = {"name": shard.name, "global_shape": shard.global_shape, "dtype": shard.dtype}
            for rank in range(4):
                for box, flat, _ in parts_of("columns_flat", shard.global_shape, 0, 0, rank, 4):
                    data = shard.data[slices_of(box)].reshape(-1)[slice(*flat)]
                    yield TensorShard(**about, box=box, flat=flat, data=data)


def make(dtype=torch.float32, change=lambda _: None):
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 7, generator=generator).to(dtype), requires_grad=False)
    model.packed = nn.Parameter(torch.randint(255, (4, 5), generator=generator).to(torch.uint8), requires_grad=False)
    with torch.no_grad():
        change(model)
    return model


def checked(saved, loaded, view=lambda adapter: adapter):
    session = Booster("cpu").checkpoint_io._session
    one = Replica(0, 1)
    noted = frozen_part(session, "save", ReplicatedStateAdapter(saved, None, one), saved)
    assert noted["names"] == ["packed", "weight"]
    check_frozen(session, "load", view(ReplicatedStateAdapter(loaded, None, one)), "run", noted)


@pytest.mark.parametrize("view", [lambda adapter: adapter, Cut], ids=["whole", "cut"])
@pytest.mark.parametrize(("saved", "loaded"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float64")])
def test_the_same_values_are_found_whatever_holds_them(saved, loaded, view):
    narrow = min(saved, loaded, key=lambda name: getattr(torch, name).itemsize)
    base = make(getattr(torch, saved))
    loaded = make(getattr(torch, loaded))
    if narrow == "float16":  # what was rounded once and is held in more bits
        loaded.weight.copy_(base.weight)
    checked(base, loaded, view)


def swap_rows(model):
    model.weight.copy_(model.weight[[1, 0, 2, 3, 4, 5]])


def next_value(model):
    model.weight[3, 2] *= 1.01


def one_bit(model):
    model.packed[1, 1] ^= 1


@pytest.mark.parametrize("change", [swap_rows, next_value, one_bit])
def test_other_values_are_refused(change):
    with pytest.raises(CheckpointError, match="'run' was saved without its 2 frozen parameters"):
        checked(make(), make(change=change))


def test_formats_that_do_not_compare_are_refused():
    with pytest.raises(CheckpointError, match="other values"):
        checked(make(torch.float16), make(torch.bfloat16))
