"""A compiled model is split at DDP's bucket boundaries, as with torch's wrapper by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from compiler_warnings import ignore_compiler_warnings
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_ddp import TorchDDPPlugin

WIDTH = 520  # a layer's weight is just over 1 MiB


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@matrix(["blocks"], how=["before", "method", "blocks", "after", "after-method"])
@on_ranks(2)
def test_compiled_graphs_are_split_as_by_ddp_by_hand(how):
    # Warnings of torch's compiler: on its first import, and about the inputs of a block.
    ignore_compiler_warnings()
    graphs, sizes = [], {}

    def backend(graph_module, _inputs):
        graphs.append(sum(node.op.startswith("call") for node in graph_module.graph.nodes))
        return graph_module.forward

    for by_hand in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Stack(2), Stack(2)) if how == "blocks" else Stack(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "before":
            model = torch.compile(model, backend=backend)
        for part in {"method": [model], "blocks": [*model.children()]}.get(how, []):
            part.compile(backend=backend)
        if by_hand:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        else:
            wrapped, optimizer, *_ = Booster("cpu", plugin=TorchDDPPlugin(bucket_cap_mb=1)).boost(model, optimizer)
        if how == "after":
            wrapped = torch.compile(wrapped, backend=backend)
        elif how == "after-method":
            wrapped.compile(backend=backend)
        sizes[by_hand] = []
        for _step in range(3):
            wrapped(torch.randn(2, WIDTH) + dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes[by_hand].append(list(graphs))
            graphs.clear()
    assert len(sizes[True][0]) > 1, "one graph per bucket"
    assert sizes[True] == sizes[False]


@on_ranks(2)
def test_default_buckets_are_those_of_torch():
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=False))
    model = Stack(1)
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    by_hand = DistributedDataParallel(Stack(1))
    ours, expected = [(ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default) for ddp in (boosted.ddp, by_hand)]
    assert ours == expected
