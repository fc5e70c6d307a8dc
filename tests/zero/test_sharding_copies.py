"""Parameters that several pipeline stages hold are laid out alike on each, whatever is next to them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from booster_runtime.sharding.ranks import ShardingRanks
from booster_zero.engine import Format, Layout


@pytest.mark.parametrize("kind", ["flat", "parameter"])
def test_copies_are_cut_alike_at_every_place(kind):
    dtypes = {"working": torch.float32, "master": torch.float32, "wire": torch.float32}
    cpu = torch.device("cpu")
    plain = Format(**dtypes, device=cpu, step_device=cpu, is_trained=True, partition=kind)
    copied = replace(plain, copies=(0, 3))

    def plans_of_copies(bucket_bytes, others):
        parameters = [nn.Parameter(torch.zeros(size)) for size in (300, 7, 40, *others)]
        layout = Layout(
            nn.ParameterList(parameters),
            ShardingRanks(shard_group=None, shard_rank=0, shard_size=2),
            lambda plan, parameters, format_, ranks: SimpleNamespace(plan=plan, format=format_),
            bucket_bytes=bucket_bytes,
        )
        own = dict(enumerate(parameters[3:], 3))
        layout.add(own, dict.fromkeys(own, plain))
        shared = {index: parameters[index] for index in (2, 1, 0)}
        layout.add(shared, dict.fromkeys(shared, copied))
        return [bucket.plan for bucket in layout.buckets if bucket.format.copies]

    assert plans_of_copies(64, [5, 1000, 3]) == plans_of_copies(2**20, [17])
