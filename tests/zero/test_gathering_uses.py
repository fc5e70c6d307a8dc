"""Any use of a parameter finds its values: gradients equal those of one process, however the model goes about it."""

from functools import partial
from unittest import mock

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from gathering_plugin import GatheringPlugin
from ranked import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import peak_memory
from booster_testing.compare import EXACT, assert_same_tensors
from booster_zero.engine import Bucket

WIDTH = 12


class Layers(nn.Module):
    """Four layers and a vector; subclasses use them in their own ways. Input and output of shape ``(N, 12)``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))


class Repeated(Layers):
    def forward(self, x):
        for layer in [*self.layers, *self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return x * self.gain


class Checkpointed(Layers):
    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x * self.gain


class InOtherFormats(Layers):
    """Has views of its parameters in other formats saved: complex ones, conjugates and their parts, and bits."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        weight = torch.view_as_complex(first.weight.view(WIDTH, WIDTH // 2, 2))
        z = torch.view_as_complex(x.view(-1, WIDTH // 2, 2))
        x = torch.tanh(torch.view_as_real(z @ weight.t()[:, : WIDTH // 2]).flatten(1))
        x = torch.tanh(second(x) * torch.view_as_complex(third.bias.view(-1, 2)).conj().imag.repeat(2))
        rotated = torch.view_as_complex(third.weight.view(WIDTH, WIDTH // 2, 2))[1:].conj()
        z = torch.view_as_complex(x.view(-1, WIDTH // 2, 2)) @ rotated.t()
        x = torch.tanh(torch.cat([z.real, z.imag[:, :1]], dim=1))
        signs = Signed.apply(x, fourth.weight.detach().view(torch.int32))
        return torch.tanh(fourth(signs)) * self.gain


class Signed(torch.autograd.Function):
    """Multiplies by the signs of numbers that are given as bits; backward takes the bits from what was saved."""

    @staticmethod
    def forward(ctx, x, bits):
        ctx.save_for_backward(bits)
        return x @ (1.0 - 2.0 * (bits < 0)).t()

    @staticmethod
    def backward(ctx, grad):
        (bits,) = ctx.saved_tensors
        return grad @ (1.0 - 2.0 * (bits < 0)), None


class Sparse(Layers):
    """Multiplies by a sparse matrix of constant places, whose values are a parameter."""

    def forward(self, x):
        places = torch.arange(WIDTH).repeat(2, 1)
        matrix = torch.sparse_coo_tensor(places, self.gain * 1.5, (WIDTH, WIDTH), check_invariants=True)
        constant = torch.eye(WIDTH).to_sparse()
        for layer in self.layers:
            x = torch.sparse.mm(matrix, torch.tanh(layer(x)).t()).t()
            x = torch.tanh(torch.mm(constant, x.t()).t() + layer.bias)
        return x


MODELS = {
    "repeated": Repeated,
    "checkpointed": Checkpointed,
    "in other formats": InOtherFormats,
    "sparse": Sparse,
}


def make(name):
    torch.manual_seed(5)
    return MODELS[name]()


def batch(step, size):
    return torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(step))


def boost(model, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    booster = Booster(plugin=GatheringPlugin(**{"chunk_bytes": 256, **options}))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    return booster, boosted, optimizer


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_gradients_equal_one_process(name):
    def rows(step, replica):
        """Return four samples, and three in every other step."""
        return batch(10 * step + replica, 1)[step % 2 :]

    def gathered(_booster, model, _optimizer):
        return [chunk.is_gathered for chunk in model.gatherer.layout.buckets]

    case = Case(build=partial(make, name), batch=rows, steps=4)
    for chunks in assert_equals_one_process(case, Setting(GatheringPlugin, {"chunk_bytes": 256}), tell=gathered):
        assert len(chunks) > 2
        assert sum(chunks) <= 1


@pytest.mark.parametrize("name", ["repeated", "checkpointed"])
@on_ranks(2)
def test_a_backward_that_the_script_calls_leaves_no_values_behind(name):
    _, model, _ = boost(make(name))
    model(batch(0, 1)).square().mean().backward()
    for parameter in model.unwrap().parameters():
        with pytest.raises(ConfigError, match="is kept in shards"):
            parameter.sum()


@on_ranks(2)
def test_parameters_that_are_not_sharded_are_gathered_once_a_step():
    states = []
    # Backward needs all weights but the first layer's, and the one that forward used last is still there.
    for frac, num_gathers in [(0.0, 8), (0.5, 8 + 2), (1.0, 8 + 6)]:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
        for layer in model:
            nn.init.eye_(layer.weight)
        booster, wrapped, optimizer = boost(model, chunk_bytes=16 * 16 * 4, release_fraction=frac)
        assert len(wrapped.gatherer.layout.buckets) == 8
        for _ in range(2):
            with mock.patch.object(Bucket, "start_gather", autospec=True, side_effect=Bucket.start_gather) as gather:
                booster.backward(wrapped(torch.ones(2, 16)).square().mean(), optimizer)
                optimizer.step()
            optimizer.zero_grad()
        assert gather.call_count == num_gathers
        states.append(wrapped.state_dict())
    assert_same_tensors(states[0], states[2], EXACT)
    assert_same_tensors(states[1], states[2], EXACT)


@on_ranks(2)
def test_few_chunks_are_whole_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    booster, wrapped, optimizer = boost(model, chunk_bytes=64 * 64 * 4, max_prefetch=1)
    counted = []
    for layer in model:
        layer.register_forward_hook(
            lambda *_: counted.append(sum(chunk.whole is not None for chunk in wrapped.gatherer.layout.buckets))
        )
    for _ in range(2):
        loss = wrapped(torch.randn(2, 64)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    most, num_chunks = max(counted), len(wrapped.gatherer.layout.buckets)
    assert num_chunks == 12
    assert most <= 3  # in use, kept for what comes right after, and on its way


@on_ranks(2)
def test_a_forward_without_a_backward_leaves_nothing_behind():
    _, model, _ = boost(make("repeated"))
    x = torch.randn(2**15, WIDTH)  # 1.5 MiB, and as much for each of twelve outputs that tanh saves
    left = []
    for _ in range(3):  # the C library may take some for later in one of them, but not in all
        with peak_memory() as used:
            for _ in range(20):
                model(x)
        left.append(used.kept_bytes)
    assert min(left) < 2 * 12 * 1.5 * 2**20, "less than two forwards keep"
